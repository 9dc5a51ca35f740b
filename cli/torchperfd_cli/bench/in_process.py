"""Measures a DataLoader in the process that trains, for ``client.bench()``."""

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torchperfd_cli.bench.loader_bench import LoaderBench, bench_loader
from torchperfd_cli.bench.search import SearchSpace, search_space
from torchperfd_cli.bench.settings import LoaderDescription, LoaderSetting, Outcome, RestOfStep, Unusable
from torchperfd_cli.bench.worker_process import explain

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from torchperfd_cli.bench.loader_timing import Step


class LoaderHere:
    """Measures a loader where it is. A loader that deadlocks cannot be ended here.

    Args:
        loader: Is not changed.
        step: The rest of a training step, if there is one.
        rest_seconds: What it takes, as measured while training; None where unknown.
        seconds: To measure each setting for.
        stop: Set to end the search with its next setting.
    """

    def __init__(
        self,
        loader: "DataLoader[Any]",
        step: "Step | None",
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
        """Return what the loader is like."""
        from torchperfd_cli.bench.loader_timing import loader_description

        return loader_description(self._loader, has_step=self._step is not None)

    def measure(self, setting: LoaderSetting, share: float = 1.0) -> Outcome:
        """Measure a setting once, for a share of the usual time."""
        from torchperfd_cli.bench.loader_timing import measure_loader

        if self._stop.is_set():
            raise KeyboardInterrupt
        try:
            return measure_loader(self._loader, setting, self._seconds * share, self._step)
        except Exception as error:  # noqa: BLE001 - of the script's dataset or step
            return Unusable(explain(error))

    def rest_of_step(self, setting: LoaderSetting) -> RestOfStep | None:
        """Measure a step without its input; None where it cannot be had."""
        from torchperfd_cli.bench.ceiling import measure_ceiling, predict_ceiling

        if self._step is not None:
            return measure_ceiling(self._loader, setting, self._seconds, self._step)
        if self._rest_seconds and not self._loader.num_workers:
            return predict_ceiling(self._loader, setting, self._seconds, self._rest_seconds)
        return RestOfStep(self._rest_seconds) if self._rest_seconds else None


def bench_here(
    loader: "DataLoader[Any]",
    *,
    step: "Step | None",
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


def _on_the_same_device(work: Any) -> Any:
    """Return what runs on another thread with this thread's CUDA device."""
    import torch

    cuda: Any = torch.cuda
    if not cuda.is_initialized():
        return work
    device = cuda.current_device()

    def run() -> None:
        cuda.set_device(device)
        work()

    return run
