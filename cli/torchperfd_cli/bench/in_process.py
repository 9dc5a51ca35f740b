"""Measures a DataLoader, and the step without its input, in the process that trains, for ``client.bench()``.

How long a step takes without its input is measured by replay, and predicted from steps with their input.
"""

import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch

from torchperfd_cli.bench.loader_bench import LoaderBench, bench_loader
from torchperfd_cli.bench.loader_process import (
    LoaderDescription,
    LoaderSetting,
    Outcome,
    RestOfStep,
    Unusable,
)
from torchperfd_cli.bench.loader_timing import (
    Step,
    batch_shape,
    endless_batches,
    loader_description,
    measure_loader,
    operator_threads,
    wait_for_device,
    with_setting,
)
from torchperfd_cli.bench.search import SearchSpace, search_space
from torchperfd_cli.bench.worker_process import explain

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


class LoaderHere:
    """Measures a loader where it is. A loader that deadlocks cannot be ended here.

    Args:
        loader: Is not changed.
        rest_seconds: What it takes, as measured while training; None where unknown.
        stop: Set to end the search with its next setting.
    """

    def __init__(
        self,
        loader: "DataLoader[Any]",
        step: Step | None,
        rest_seconds: float | None,
        seconds: float,
        stop: threading.Event,
    ) -> None:
        self._loader = loader
        self._step = step
        self._rest_seconds = rest_seconds
        self._seconds = seconds
        self._stop = stop

    def facts(self) -> LoaderDescription:
        return loader_description(self._loader, has_step=self._step is not None)

    def measure(self, setting: LoaderSetting, share: float = 1.0) -> Outcome:
        if self._stop.is_set():
            raise KeyboardInterrupt
        try:
            return measure_loader(self._loader, setting, self._seconds * share, self._step)
        except Exception as error:  # noqa: BLE001 - of the script's dataset or step
            return Unusable(explain(error))

    def rest_of_step(self, setting: LoaderSetting) -> RestOfStep | None:
        if self._step is not None:
            return measure_ceiling(self._loader, setting, self._seconds, self._step)
        if self._rest_seconds and not self._loader.num_workers:
            return predict_ceiling(self._loader, setting, self._seconds, self._rest_seconds)
        return RestOfStep(self._rest_seconds) if self._rest_seconds else None


def bench_here(
    loader: "DataLoader[Any]",
    *,
    step: Step | None,
    rest_seconds: float | None,
    seconds: float,
    max_workers: int | None,
    batch_sizes: Sequence[int],
) -> LoaderBench:
    """Measure a loader of this process under other settings.

    It is drawn from on another thread: the client counts draws of the training thread as training.
    """
    stop = threading.Event()
    measurer = LoaderHere(loader, step, rest_seconds, seconds, stop)
    found: list[LoaderBench] = []
    failed: list[BaseException] = []

    def space(facts: LoaderDescription) -> SearchSpace:
        return search_space(facts, most_workers=max_workers, batch_sizes=batch_sizes)

    def work() -> None:
        try:
            found.append(bench_loader(type(loader.dataset).__name__, measurer, space, lambda *_: None))
        except BaseException as error:  # noqa: BLE001 - raised again on the caller's thread
            failed.append(error)

    thread = threading.Thread(target=_on_the_same_device(work), name="torchperfd-bench", daemon=True)
    thread.start()
    try:
        thread.join()
    except KeyboardInterrupt:
        stop.set()
        thread.join()
    if failed:
        raise failed[0]
    return found[0]


def _on_the_same_device(work: Callable[[], None]) -> Callable[[], None]:
    cuda: Any = torch.cuda
    if not cuda.is_initialized():
        return work
    device = cuda.current_device()

    def run() -> None:
        cuda.set_device(device)
        work()

    return run
