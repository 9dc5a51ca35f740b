"""Train a ResNet-18 on satellite images, with one of three implementations of the dataset."""

import argparse
import sys
from pathlib import Path

import torch
from data import Compressed, InTorch, Plain, files
from torch import nn
from torch.utils.data import DataLoader

sys.path.append(str(Path(__file__).resolve().parents[1]))
from resnet import resnet18

DATASETS = {"compressed": Compressed, "plain": Plain, "in_torch": InTorch}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dataset", choices=DATASETS, default="compressed")
    parser.add_argument("--epochs", type=int, default=6)
    options = parser.parse_args()
    torch.manual_seed(0)
    loader = DataLoader(DATASETS[options.dataset](files()), batch_size=32, shuffle=True)
    model = resnet18(width=8)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(options.epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    main()
