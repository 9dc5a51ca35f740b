"""Slow training loops, each beside the same loop with the advice taken: what the analyser must tell apart.

Each builder returns one training step of one process on the CPU. ``tuned`` is the loop after the change.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import nn

Step = Callable[[], None]
Build = Callable[[bool], Step]

# What reading one item takes, as from a disk or an object store: time, and no CPU.
_READ_S: Final = 0.001
_MICRO_BATCHES: Final = 4


class _Slow(torch.utils.data.Dataset[torch.Tensor]):
    """Items that have to be waited for."""

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(_READ_S)
        return torch.full((1024,), float(index % 7))


def _batches(loader: "torch.utils.data.DataLoader[torch.Tensor]") -> Iterator[torch.Tensor]:
    while True:
        yield from loader


def _mlp(width: int, depth: int, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width, dtype=dtype) for _ in range(depth)))


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Callable[[], torch.Tensor]) -> Step:
    def step() -> None:
        optimizer.zero_grad()
        model(batch()).square().mean().backward()
        optimizer.step()

    return step


def loader_workers(tuned: bool) -> Step:
    """Read each batch in the training process, or in as many workers as keep up."""
    options: dict[str, Any] = {"num_workers": 2, "persistent_workers": True} if tuned else {}
    loader = torch.utils.data.DataLoader(_Slow(), batch_size=16, **options)
    model, batches = _mlp(1024, 4), _batches(loader)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return _train(model, optimizer, lambda: next(batches).repeat(8, 1))


def float64(tuned: bool) -> Step:
    """Train in double precision, or in single."""
    dtype = torch.float32 if tuned else torch.float64
    model, x = _mlp(512, 6, dtype), torch.ones(512, 512, dtype=dtype)
    return _train(model, torch.optim.SGD(model.parameters(), lr=1e-3), lambda: x)


def optimizer_loop(tuned: bool) -> Step:
    """Update two hundred small parameters one by one, or all in one operator."""
    model, x = _mlp(48, 100), torch.ones(64, 48)
    return _train(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=tuned), lambda: x)


def zero_grad(tuned: bool) -> Step:
    """Fill large gradients with zeros and add to them, or let the new ones take their place."""
    model, x = _mlp(1024, 12), torch.ones(8, 1024)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad(set_to_none=tuned)
        model(x).square().mean().backward()
        optimizer.step()

    return step


def small_operators(tuned: bool) -> Step:
    """Normalise a batch row by row, or as a whole, before a model sees it."""
    model, x = _mlp(64, 4), torch.ones(512, 64)
    scale, shift = torch.full((64,), 2.0), torch.full((64,), 0.5)

    def rows() -> torch.Tensor:
        if tuned:
            return x * scale + shift
        result = torch.empty_like(x)
        for row in range(len(x)):
            result[row] = x[row] * scale + shift
        return result

    return _train(model, torch.optim.SGD(model.parameters(), lr=1e-3), rows)


def gradient_accumulation(tuned: bool) -> Step:
    """Exchange gradients after each of four micro-batches, or after the last; for two processes."""
    model = nn.parallel.DistributedDataParallel(_mlp(1024, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.ones(16, 1024)

    def step() -> None:
        optimizer.zero_grad()
        for micro_batch in range(_MICRO_BATCHES):
            last = micro_batch == _MICRO_BATCHES - 1
            with model.no_sync() if tuned and not last else contextlib.nullcontext():
                model(x).square().mean().backward()
        optimizer.step()

    return step


def well_tuned() -> Step:
    """Train a model whose operators are large, with nothing in their way."""
    model, x = _mlp(1024, 4), torch.ones(256, 1024)
    return _train(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), lambda: x)


PAIRS: Final[dict[str, Build]] = {
    "loader-workers": loader_workers,
    "float64": float64,
    "fused-optimizer": optimizer_loop,
    "zero-grad": zero_grad,
    "small-operators": small_operators,
    "gradient-accumulation": gradient_accumulation,
}
"""By the rule that must find the slow one."""

PROCESSES: Final = {"gradient-accumulation": 2}
"""How many processes a loop wants, where it is not one."""
