"""Train a ResNet-18 on images of CIFAR's shape, each of which is read from a slow disk."""

import argparse
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

sys.path.append(str(Path(__file__).resolve().parents[1]))
from resnet import resnet18

READ_SECONDS = 0.002


class Images(Dataset):
    """Random images. Each one waits for as long as a small file on a network disk takes."""

    def __init__(self, count: int) -> None:
        random = torch.Generator().manual_seed(0)
        self.images = torch.randint(0, 256, (count, 32, 32, 3), dtype=torch.uint8, generator=random)
        self.labels = torch.randint(0, 10, (count,), generator=random)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(READ_SECONDS)
        return self.images[index].permute(2, 0, 1) / 255, self.labels[index]


def make_loader(batch_size: int = 32, workers: int = 0, steps: int = 50) -> DataLoader:
    return DataLoader(Images(batch_size * steps), batch_size=batch_size, shuffle=True, num_workers=workers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = resnet18(width=16)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for images, labels in make_loader(options.batch_size, options.workers, options.steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
