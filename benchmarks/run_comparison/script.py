"""A small script for pairs of real runs; ``--slow-forward N`` repeats a multiplication in the forward."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

_BATCH = 32


class Model(nn.Module):
    """Two layers; the forward may do some work more than once."""

    def __init__(self, repeats: int) -> None:
        super().__init__()
        self.first = nn.Linear(256, 1024)
        self.layers = nn.Sequential(self.first, nn.ReLU(), nn.Linear(1024, 10))
        self.repeats = repeats

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for _ in range(self.repeats):
                self.first(inputs)
        logits: torch.Tensor = self.layers(inputs)
        return logits


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--slow-forward", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    count = options.steps * _BATCH
    data = TensorDataset(torch.randn(count, 256), torch.randint(0, 10, (count,)))
    model = Model(options.slow_forward)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for inputs, labels in DataLoader(data, batch_size=_BATCH):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


if __name__ == "__main__":
    main()
