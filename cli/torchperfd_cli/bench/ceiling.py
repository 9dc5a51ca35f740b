"""How long a training step takes without its input: by replay, and predicted from steps with their input.

A step that follows the making of its batch in the same process takes longer by some tenths of a millisecond,
whatever its length: the loader's code and data have displaced those of torch from the caches. This shows
alike in any step, so that a small one measures it for all.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch

from torchperfd_cli.bench.loader_timing import (
    Step,
    batch_shape,
    endless_batches,
    operator_threads,
    wait_for_device,
    with_setting,
)
from torchperfd_cli.bench.settings import LoaderSetting, RestOfStep

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

_MAX_CACHED: Final = 8
_MAX_CACHED_BYTES: Final = 256 << 20
_MIN_TIMED: Final = 5
_LASTS: Final = 1.5
_LAYERS: Final = 4
_WIDTH: Final = 64
# No more of a step is taken to be the cold caches' than this.
_MAX_COLD: Final = 0.75


def measure_ceiling(
    loader: "DataLoader[Any]", setting: LoaderSetting, seconds: float, step: Step
) -> RestOfStep:
    """Measure the rest of a step with batches in memory, and predict it from steps with batches just drawn.

    Both alternate every few steps, because a machine's speed changes within seconds.

    Args:
        loader: Is not changed.
        setting: The arguments to use, except workers, which would take CPUs.
        seconds: For one setting. It takes half as long again, or longer where batches take long.
        step: The rest of a training step.
    """
    with operator_threads(setting):
        batches = endless_batches(_without_workers(loader, setting))
        try:
            cached = _kept(batches)
            few = max(1, len(cached) // 2)
            replayed: list[float] = []
            drawn: list[float] = []
            cold_start = _ColdStart()
            began = time.perf_counter()
            while len(drawn) < _MIN_TIMED or time.perf_counter() - began < _LASTS * seconds:
                step(cached[0])  # its caches are those of the loader
                replayed += [_timed(lambda batch=batch: step(batch)) for batch in cached]  # type: ignore[misc]
                for batch in itertools.islice(batches, few):
                    drawn.append(_timed(lambda batch=batch: step(batch)))  # type: ignore[misc]
                for _ in itertools.islice(batches, few):
                    cold_start.measure()
            return RestOfStep(_typical(replayed), _warm(_typical(drawn), cold_start.seconds))
        finally:
            batches.close()  # type: ignore[attr-defined]  # a generator


def predict_ceiling(
    loader: "DataLoader[Any]", setting: LoaderSetting, seconds: float, rest_seconds: float
) -> RestOfStep:
    """Predict the rest of a step from that of steps which made their batches in this process.

    Args:
        loader: Is not changed.
        setting: The arguments to use, except workers.
        seconds: To draw batches for.
        rest_seconds: Of the steps.
    """
    batches = endless_batches(_without_workers(loader, setting))
    try:
        cold_start = _ColdStart()
        began = time.perf_counter()
        for count, _ in enumerate(batches):
            cold_start.measure()
            if count >= _MIN_TIMED and time.perf_counter() - began >= seconds:
                break
        predicted = _warm(rest_seconds, cold_start.seconds)
        return RestOfStep(predicted, predicted)
    finally:
        batches.close()  # type: ignore[attr-defined]  # a generator


class _ColdStart:
    """What a step takes longer right after the making of a batch, of a small step that needs no data."""

    def __init__(self) -> None:
        self._weights = [
            torch.zeros(_WIDTH, _WIDTH, dtype=torch.float32, device="cpu", requires_grad=True)
            for _ in range(_LAYERS)
        ]
        self._inputs = torch.ones(_WIDTH // 2, _WIDTH, dtype=torch.float32, device="cpu")
        self._cold: list[float] = []
        self._warm: list[float] = []
        self._step()

    def measure(self) -> None:
        """Measure once more; a batch has just been made."""
        self._cold.append(_timed(self._step))
        self._step()
        self._warm.append(_timed(self._step))

    @property
    def seconds(self) -> float:
        """The difference; none with a CUDA device in use, beside which the host's time is hidden."""
        cuda: Any = torch.cuda
        if cuda.is_initialized():
            return 0.0
        return max(0.0, _typical(self._cold) - _typical(self._warm))

    def _step(self) -> None:
        outputs = self._inputs
        for weights in self._weights:
            outputs = (outputs @ weights).relu()
        for weights, gradient in zip(
            self._weights, torch.autograd.grad(outputs.square().mean(), self._weights), strict=True
        ):
            weights.detach().add_(gradient, alpha=-1e-3)


def _without_workers(loader: "DataLoader[Any]", setting: LoaderSetting) -> "DataLoader[Any]":
    return with_setting(loader, replace(setting, workers=0, prefetch=0))


def _kept(batches: Iterator[Any]) -> list[Any]:
    """Draw some batches, no more than memory has room for."""
    kept: list[Any] = []
    for batch in itertools.islice(batches, _MAX_CACHED):
        kept.append(batch)
        if len(kept) * batch_shape(batch).size >= _MAX_CACHED_BYTES:
            break
    return kept


def _warm(rest: float, cold_start: float) -> float:
    return max(rest - cold_start, (1 - _MAX_COLD) * rest)


def _typical(seconds: Sequence[float]) -> float:
    """Return the mean of the middle half: batches may differ, and what disturbs a step is left out."""
    ordered = sorted(seconds)
    cut = len(ordered) // 4
    return statistics.fmean(ordered[cut : len(ordered) - cut])


def _timed(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    wait_for_device()
    return time.perf_counter() - began
