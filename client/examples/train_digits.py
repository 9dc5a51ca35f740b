"""Train a small CNN on scikit-learn's handwritten digits. Knows nothing of any profiler."""

import argparse

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def build_loaders(batch_size: int, workers: int) -> tuple[DataLoader, DataLoader]:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16.0
    labels = torch.tensor(digits.target)
    train_images, test_images, train_labels, test_labels = train_test_split(
        images, labels, test_size=0.2, random_state=0, stratify=labels
    )
    train = TensorDataset(train_images, train_labels)
    test = TensorDataset(test_images, test_labels)
    return (
        DataLoader(train, batch_size=batch_size, shuffle=True, num_workers=workers),
        DataLoader(test, batch_size=batch_size, num_workers=workers),
    )


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def train_epoch(model: nn.Module, loader: DataLoader, optimizer: torch.optim.Optimizer) -> float:
    model.train()
    total = 0.0
    for images, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        total += loss.item() * len(labels)
    return total / len(loader.dataset)


@torch.no_grad()
def accuracy(model: nn.Module, loader: DataLoader) -> float:
    model.eval()
    correct = sum(int((model(images).argmax(1) == labels).sum()) for images, labels in loader)
    return correct / len(loader.dataset)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    train_loader, test_loader = build_loaders(options.batch_size, options.workers)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for epoch in range(1, options.epochs + 1):
        loss = train_epoch(model, train_loader, optimizer)
        print(f"epoch {epoch:>2}  loss {loss:.6f}  accuracy {accuracy(model, test_loader):.4f}", flush=True)


if __name__ == "__main__":
    main()
