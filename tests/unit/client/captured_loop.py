"""A loop of tiny steps that goes on until a capture has ended."""

from typing import Final

import pytest
import torch

from torchperfd.captures.manager import Capture

MODEL: Final = torch.nn.Linear(4, 1)
OPTIMIZER: Final = torch.optim.SGD(MODEL.parameters(), lr=1e-3)
_MAX_STEPS: Final = 100_000


def step() -> None:
    """Train one step."""
    OPTIMIZER.zero_grad()
    MODEL(torch.ones(2, 4)).sum().backward()
    OPTIMIZER.step()


def train_until(capture: Capture, *states: str) -> None:
    """Train until the capture is in one of these states; by default, until it has ended."""
    for _ in range(_MAX_STEPS):
        if capture.state in (states or ("complete", "failed")):
            return
        step()
    pytest.fail(f"still {capture.state}")
