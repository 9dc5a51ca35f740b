"""Negative controls: training loops in which little can be gained, where advice is likely to be wrong.

Each builder returns one training step, with a `Change` made to it or with none. Whatever the analyser advises
about such a loop is done to it and measured; nothing may make it slower.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from benchmarks.advice import models
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, TensorDataset

Step = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Change:
    """What is done to a loop.

    Attributes:
        workers: ``num_workers`` to set; None for the loop's own.
        rules: The rules whose advice is followed.
    """

    workers: int | None = None
    rules: frozenset[str] = field(default_factory=frozenset)


Build = Callable[[Change], Step]


@dataclass(frozen=True, slots=True)
class Control:
    """A loop and what it needs.

    Attributes:
        build: Returns the loop's step.
        cpus: CPUs that it may run on; None for all.
        threads: Of torch.
    """

    build: Build
    cpus: int | None = None
    threads: int = 1


class _Items(Dataset[tuple[torch.Tensor, int]]):
    """Items that take a while.

    Args:
        size: Floats in one.
        compute_s: CPU time that one takes.
        wait_s: Time beside it that one takes.
    """

    def __init__(self, size: int, compute_s: float = 0.0, wait_s: float = 0.0) -> None:
        self._data = torch.randn(512, size)
        self._compute_s, self._wait_s = compute_s, wait_s

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self._wait_s:
            time.sleep(self._wait_s)
        until = time.thread_time() + self._compute_s
        while time.thread_time() < until:
            pass
        return self._data[index], index % 10


def _items(size: int, compute_s: float = 0.0, wait_s: float = 0.0) -> Callable[[], _Items]:
    return lambda: _Items(size, compute_s, wait_s)


def _endless(loader: "DataLoader[Any]") -> Iterator[Any]:
    while True:
        yield from loader


def _loaded(dataset: Any, batch: int, workers: int, change: Change) -> Iterator[Any]:
    workers = workers if change.workers is None else change.workers
    options: dict[str, Any] = {"persistent_workers": True} if workers else {}
    if "whole-batches" in change.rules:
        order = BatchSampler(RandomSampler(dataset), batch, drop_last=False)
        return _endless(DataLoader(dataset, batch_size=None, sampler=order, num_workers=workers, **options))
    return _endless(DataLoader(dataset, batch_size=batch, shuffle=True, num_workers=workers, **options))


def _classify(
    data: Callable[[], Any],
    batch: int,
    make: Callable[[], nn.Module],
    workers: int = 0,
    *,
    is_whole: bool = False,
) -> Build:
    """Return the builder of a loop that draws, goes forward and backward, and updates by SGD.

    Args:
        data: Makes the dataset.
        batch: Samples in a batch.
        make: Makes the model.
        workers: Of the loader.
        is_whole: Its tensors are indexed once for each batch already.
    """

    def build(change: Change) -> Step:
        if is_whole:
            change = replace(change, rules=change.rules | {"whole-batches"})
        batches, model = _loaded(data(), batch, workers, change), make()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

        def step() -> None:
            x, y = next(batches)
            optimizer.zero_grad()
            torch.autograd.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()

        return step

    return build


def _update(
    make: Callable[[], nn.Module],
    x: torch.Tensor,
    optimizer: type[torch.optim.Optimizer],
    *,
    to_none: bool = True,
    **options: Any,
) -> Build:
    """Return the builder of a loop of which the update or the model's operators are the point."""

    def build(change: Change) -> Step:
        model, data = make(), x
        if "float64" in change.rules:
            model, data = model.float(), x.float() if x.is_floating_point() else x
        chosen = dict(options)
        if "fused-optimizer" in change.rules:
            chosen.pop("foreach", None)
            chosen["fused"] = True
        updating = optimizer(model.parameters(), lr=1e-3, **chosen)  # type: ignore[call-arg]
        to_nothing = to_none or "zero-grad" in change.rules

        def step() -> None:
            updating.zero_grad(set_to_none=to_nothing)
            model(data).square().mean().backward()
            updating.step()

        return step

    return build


def _tensors(size: int, count: int = 4096) -> Callable[[], TensorDataset]:
    return lambda: TensorDataset(torch.randn(count, size), torch.randint(10, (count,)))


def _tiny(size: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(size, 128), nn.ReLU(), nn.Linear(128, 10))


def _medium(size: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(
        nn.Linear(size, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
    )


def _wide(dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Linear(1024, 2048, bias=False, dtype=dtype)


_SGD, _ADAM, _ADAMW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW

CONTROLS: Final[dict[str, Control]] = {
    # Batches that cost less than a worker.
    "tensors": Control(_classify(_tensors(64), 32, _tiny(64))),
    "tensors-small": Control(_classify(_tensors(16), 8, _tiny(16))),
    "tensors-large": Control(_classify(_tensors(256), 256, _medium(256))),
    "tensors-one-core": Control(_classify(_tensors(64), 32, _tiny(64)), cpus=1),
    "items-cheap": Control(_classify(_items(64), 32, _tiny(64))),
    "items-wide": Control(_classify(_items(65_536), 16, _tiny(65_536))),
    "tensors-wide": Control(_classify(_tensors(65_536, 256), 16, _tiny(65_536))),
    "tensors-threads": Control(_classify(_tensors(256), 256, _medium(256)), threads=2),
    "tensors-whole": Control(_classify(_tensors(64), 32, _tiny(64), is_whole=True)),
    # Items that compute where CPUs are short.
    "computing": Control(_classify(_items(64, 0.0005), 32, _tiny(64))),
    "computing-some": Control(_classify(_items(256, 0.0001), 32, _medium(256))),
    "computing-one-core": Control(_classify(_items(64, 0.0005), 32, _tiny(64)), cpus=1),
    "computing-busy": Control(_classify(_items(256, 0.0003), 32, _medium(256)), threads=2),
    "waiting-one-core": Control(_classify(_items(64, 0.0, 0.001), 16, _medium(64)), cpus=1),
    "half-waiting": Control(_classify(_items(64, 0.0005, 0.0005), 16, _medium(64))),
    # Items that wait: these are to gain.
    "waiting": Control(_classify(_items(64, 0.0, 0.002), 16, _medium(64))),
    "waiting-one-worker": Control(_classify(_items(64, 0.0, 0.002), 16, _medium(64), workers=1)),
    # Workers that there are already.
    "starved": Control(_classify(_items(64, 0.0005), 32, _tiny(64), workers=4)),
    "starved-one-core": Control(_classify(_items(64, 0.0005), 32, _tiny(64), workers=2), cpus=1),
    "workers-cheap": Control(_classify(_tensors(64), 32, _tiny(64), workers=2)),
    "workers-ready": Control(_classify(_items(64, 0.0, 0.0002), 16, _medium(64), workers=2)),
    "workers-enough": Control(_classify(_items(64, 0.0, 0.001), 16, _medium(64), workers=8)),
    "workers-wide": Control(_classify(_items(65_536), 16, _tiny(65_536), workers=1)),
    # Updates in which a fused or a foreach step, or gradients set to None, bring little.
    "update-tiny": Control(_update(_tiny(64), torch.ones(8, 64), _ADAM)),
    "update-one": Control(_update(_wide, torch.ones(8, 1024), _ADAMW)),
    "update-foreach": Control(_update(lambda: models.mlp(64, 40), torch.ones(8, 64), _ADAM, foreach=True)),
    "update-fused": Control(_update(lambda: models.mlp(64, 40), torch.ones(8, 64), _ADAM, fused=True)),
    "update-threads": Control(_update(lambda: models.mlp(64, 40), torch.ones(8, 64), _ADAM), threads=2),
    "update-adagrad": Control(_update(_wide, torch.ones(8, 1024), torch.optim.Adagrad)),
    "update-momentum": Control(_update(lambda: models.mlp(64, 40), torch.ones(8, 64), _SGD, momentum=0.9)),
    "zero-tiny": Control(_update(_tiny(64), torch.ones(8, 64), _SGD, to_none=False)),
    "zero-wide": Control(_update(_wide, torch.ones(64, 1024), _SGD, to_none=False)),
    "zero-layers": Control(_update(lambda: models.mlp(1024, 12), torch.ones(8, 1024), _SGD, to_none=False)),
    "zero-transformer": Control(
        _update(lambda: models.transformer(512, 4), models.tokens(1, 8), _SGD, to_none=False)
    ),
    # Operators that are few, or small, for a reason.
    "float64-tiny": Control(
        _update(lambda: _tiny(64)().double(), torch.ones(8, 64, dtype=torch.float64), _SGD)
    ),
    "layers-many": Control(_update(lambda: models.mlp(32, 200), torch.ones(16, 32), _SGD)),
}
"""By name."""
