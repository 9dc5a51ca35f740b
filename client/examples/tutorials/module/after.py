"""Train a layer, and find the places of a mask that exceed a threshold, with operators of torch."""

import sys

import torch
from torch import nn

import torchperfd

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 30


class Masked(nn.Module):
    def __init__(self, client: torchperfd.Client) -> None:
        super().__init__()
        self.linear = nn.Linear(500, 10)
        self.client = client

    def forward(self, inputs: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with self.client.phase("linear_pass"):
            out = self.linear(inputs)
        with self.client.phase("mask_indices"):
            threshold = out.sigmoid().mean()
            places = (mask > threshold).flatten().nonzero()
        return out, places


def main() -> None:
    torch.manual_seed(0)
    client = torchperfd.attach()
    model = Masked(client)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs, mask = torch.rand(128, 500), torch.rand((20, 200, 200), dtype=torch.float)
    for _ in range(STEPS):
        optimizer.zero_grad()
        out, _places = model(inputs, mask)
        out.square().mean().backward()
        optimizer.step()


if __name__ == "__main__":
    main()
