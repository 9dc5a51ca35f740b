"""Train a small CNN on handwritten digits that are read one by one, as from storage across a network.

Reading a sample waits, and no worker process reads ahead, so most of a step waits for data. This is what
`make demo` has torchperfd find; `--workers 4` is the fix.
"""

import argparse
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset

READ_SECONDS = 0.002


class RemoteDigits(Dataset):
    def __init__(self) -> None:
        digits = load_digits()
        self.images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16.0
        self.labels = torch.tensor(digits.target)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(READ_SECONDS)
        return self.images[index], self.labels[index]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--workers", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(0)
    loader = DataLoader(
        RemoteDigits(),
        batch_size=options.batch_size,
        shuffle=True,
        num_workers=options.workers,
        persistent_workers=options.workers > 0,
    )
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * 16, 10)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for epoch in range(1, options.epochs + 1):
        total = 0.0
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(labels)
        print(f"epoch {epoch:>2}  loss {total / len(loader.dataset):.6f}", flush=True)


if __name__ == "__main__":
    main()
