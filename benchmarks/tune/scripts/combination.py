"""A slow loader, many small parameters, and gradients that are filled with zeros."""

import time

import torch
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset[tuple[torch.Tensor, int]]):
    """Rows that take 1 ms to read."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(0.001)
        return torch.full((32,), (index % 1000) / 1000), index % 10


def main() -> None:
    torch.manual_seed(1)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(150)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    loader = DataLoader(
        Rows(),
        batch_size=16,
        shuffle=True,
    )
    loss = torch.nn.CrossEntropyLoss()
    for inputs, labels in loader:
        optimizer.zero_grad(set_to_none=False)
        loss(model(inputs), labels).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
