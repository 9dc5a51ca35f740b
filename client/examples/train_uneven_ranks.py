"""Train a small CNN on several ranks, of which the last reads its handwritten digits from far away.

The other ranks wait for it in every step, which `torchperfd run` and `torchperfd top` find; `--workers 4` is
the fix.

    torchrun --standalone --nproc-per-node 2 -m torchperfd run train_uneven_ranks.py
"""

import argparse
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

NEAR_SECONDS, FAR_SECONDS = 0.0001, 0.003


class Digits(Dataset):
    """One rank's share of the digits, read one by one."""

    def __init__(self, rank: int, ranks: int) -> None:
        digits = load_digits()
        share = len(digits.target) // ranks
        mine = slice(rank * share, (rank + 1) * share)
        self.images = torch.tensor(digits.images[mine], dtype=torch.float32).unsqueeze(1) / 16.0
        self.labels = torch.tensor(digits.target[mine])
        self.read_seconds = FAR_SECONDS if rank == ranks - 1 else NEAR_SECONDS

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(self.read_seconds)
        return self.images[index], self.labels[index]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--workers", type=int, default=0)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    loader = DataLoader(
        Digits(dist.get_rank(), dist.get_world_size()),
        batch_size=options.batch_size,
        shuffle=True,
        num_workers=options.workers,
        persistent_workers=options.workers > 0,
    )
    model = DistributedDataParallel(
        nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * 16, 10)
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for epoch in range(1, options.epochs + 1):
        total = 0.0
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            total += loss.item()
        if dist.get_rank() == 0:
            print(f"epoch {epoch:>2}  loss {total / len(loader):.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
