"""Settings of a DataLoader, and their measurement in a process, which is started anew after a hang."""

import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final, Protocol

import msgspec

from torchperfd.model.loader_facts import LoaderFacts
from torchperfd_cli.bench.worker_process import (
    Answer,
    BadTargetError,
    FactoryError,
    WorkerFailedError,
    WorkerProcess,
    explain,
    find_target,
    serve,
)

DEFAULT_PREFETCH: Final = 2
"""Of ``DataLoader``, for each worker."""


@dataclass(frozen=True, slots=True)
class LoaderSetting:
    """The arguments of a DataLoader that ``bench`` varies.

    Attributes:
        batch_size: None leaves batches as the loader makes them.
        prefetch: ``prefetch_factor``; 0 without workers.
        start_method: How workers start: ``fork``, ``spawn`` or ``forkserver``; empty for the loader's own.
        threads: ``torch.set_num_threads`` in the process that trains; 0 leaves it.
    """

    workers: int
    batch_size: int | None = None
    prefetch: int = 0
    pin_memory: bool = False
    start_method: str = ""
    threads: int = 0

    @property
    def cost(self) -> tuple[int, int, bool]:
        """What orders settings of equal speed: fewer workers first, then fewer batches ahead."""
        return self.workers, self.prefetch, self.pin_memory

    def code(self, own: "LoaderSetting | None" = None) -> str:
        """Return the setting as arguments of ``DataLoader``; of the batch size only what is not its own."""
        arguments = [f"num_workers={self.workers}"]
        if self.batch_size is not None and (own is None or own.batch_size != self.batch_size):
            arguments.insert(0, f"batch_size={self.batch_size}")
        if self.workers:
            if self.prefetch != DEFAULT_PREFETCH:
                arguments.append(f"prefetch_factor={self.prefetch}")
            arguments.append("persistent_workers=True")
        if self.workers and self.start_method:
            arguments.append(f'multiprocessing_context="{self.start_method}"')
        if self.pin_memory:
            arguments.append("pin_memory=True")
        code = f"DataLoader(..., {', '.join(arguments)})"
        return f"{code}, torch.set_num_threads({self.threads})" if self.threads else code


@dataclass(frozen=True, slots=True)
class Speed:
    """What a setting gave.

    Attributes:
        samples_per_second: Over all blocks of all rounds.
        spread: Half the distance between the quartiles of the blocks, as a part of the median; 0 to 1.
        batch_seconds: Time from one batch to the next.
        wait_seconds: What of it was spent waiting for the loader.
        start_seconds: Until the first batch was there.
        batch_bytes: Of the tensors in one batch.
        loader: How the loop used its loader; None with workers.
    """

    samples_per_second: float
    spread: float
    batch_seconds: float
    wait_seconds: float
    start_seconds: float
    batches: int
    batch_bytes: int
    loader: LoaderFacts | None = None


@dataclass(frozen=True, slots=True)
class RestOfStep:
    """What a training step takes without its input.

    Attributes:
        seconds: With batches that are in memory; or as predicted from the steps so far.
        predicted_seconds: Predicted from steps whose batches were made in the same process right before, less
            what such a step takes longer because of cold caches. None where it was not measured.
    """

    seconds: float
    predicted_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Unusable:
    """Why a setting gave nothing; one line."""

    reason: str


Outcome = Speed | Unusable


@dataclass(frozen=True, slots=True)
class LoaderDescription:
    """What the loader is like before anything is measured.

    Attributes:
        can_batch: Whether its batch size may be varied: it puts batches together itself.
        has_step: Whether the factory also gave the rest of a training step.
        has_device: Whether there is a CUDA device, for which memory may be pinned.
    """

    current: LoaderSetting
    can_batch: bool
    has_step: bool
    cpus: float
    has_device: bool


# A measurement may take five times as long as asked for, after its workers have started.
_MAX_FACTOR: Final = 6.0


class LoaderMeasurer(Protocol):
    """Measures settings of one loader."""

    def facts(self) -> LoaderDescription:
        """Return what the loader is like."""

    def measure(self, setting: LoaderSetting, share: float = 1.0) -> Outcome:
        """Measure a setting once, for a share of the usual time."""

    def rest_of_step(self, setting: LoaderSetting) -> RestOfStep | None:
        """Measure a step without its input; None where it cannot be had."""


class LoaderProcess:
    """Measures in a process of its own; FactoryError is raised if that cannot make the loader.

    Args:
        target: As ``module:name``: a DataLoader, or a function without arguments that returns one.
        timeout: Seconds to wait for a loader, and for the first batch of a setting.
    """

    def __init__(self, target: str, seconds: float, timeout: float) -> None:
        self._target = target
        self._seconds = seconds
        self._timeout = timeout
        self._process: WorkerProcess | None = None
        self._facts: LoaderDescription | None = None

    def __enter__(self) -> "LoaderProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def facts(self) -> LoaderDescription:
        self._started()
        assert self._facts is not None
        return self._facts

    def measure(self, setting: LoaderSetting, share: float = 1.0) -> Outcome:
        answer = self._ask(setting, self._seconds * share)
        if "speed" in answer:
            return msgspec.convert(answer["speed"], Speed)
        return Unusable(str(answer["unusable"]))

    def rest_of_step(self, setting: LoaderSetting) -> RestOfStep | None:
        if not self.facts().has_step:
            return None
        found = self._ask(setting, self._seconds, ceiling=True).get("ceiling")
        return RestOfStep(**found) if found else None

    def close(self) -> None:
        """End the process and its workers."""
        process, self._process = self._process, None
        if process is not None:
            process.close()

    def _started(self) -> WorkerProcess:
        if self._process is not None:
            return self._process
        process = WorkerProcess("torchperfd_cli.bench.loader_process", [self._target])
        self._process = process
        try:
            answer = process.start(self._timeout, f"{self._target} gave no loader")
        except FactoryError:
            self._process = None
            raise
        self._facts = msgspec.convert(answer["facts"], LoaderDescription)
        return process

    def _ask(self, setting: LoaderSetting, seconds: float, *, ceiling: bool = False) -> dict[str, Any]:
        request = {"setting": asdict(setting), "seconds": seconds, "ceiling": ceiling}
        try:
            return self._started().ask(request, self._timeout + _MAX_FACTOR * seconds)
        except WorkerFailedError as error:
            self._process = None
            return {"unusable": str(error)}


def main() -> None:
    """Answer requests until they end."""
    target, requests, answers = sys.argv[1:]
    serve(int(requests), int(answers), lambda: _make(target))


def _make(target: str) -> tuple[Answer, Callable[[Answer], Answer]]:
    """Make the loader that a target names, with the rest of a step if it has one."""
    from torch.utils.data import DataLoader

    from torchperfd_cli.bench.in_process import measure_ceiling
    from torchperfd_cli.bench.loader_timing import loader_description, measure_loader

    # The number of workers is what is varied.
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    found = find_target(target)
    if callable(found) and not isinstance(found, DataLoader):
        found = found()
    loader, step = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    if not isinstance(loader, DataLoader) or not (step is None or callable(step)):
        raise BadTargetError(
            f"it gives a {type(loader).__name__}",
            "have it return a DataLoader, or a DataLoader and a function that trains on one batch",
        )

    def answer(request: dict[str, Any]) -> Answer:
        setting, seconds = LoaderSetting(**request["setting"]), request["seconds"]
        try:
            if request["ceiling"] and step is not None:
                return {"ceiling": asdict(measure_ceiling(loader, setting, seconds, step))}
            return {"speed": asdict(measure_loader(loader, setting, seconds, step))}
        except Exception as error:  # noqa: BLE001 - of the script's dataset or step
            return {"unusable": explain(error)}

    return {"facts": asdict(loader_description(loader, has_step=step is not None))}, answer
