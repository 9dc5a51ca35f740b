"""Each item waits for a disk."""

import time

import torch
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset[tuple[torch.Tensor, int]]):
    """Rows that take 2 ms to read."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(0.002)
        return torch.full((32,), (index % 1000) / 1000), index % 10


def main() -> None:
    torch.manual_seed(1)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(32, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    loader = DataLoader(Rows(), batch_size=16, shuffle=True)
    loss = torch.nn.CrossEntropyLoss()
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss(model(inputs), labels).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
