"""Measures settings of a DataLoader in a process, started anew after each that had to be killed.

It is run by :func:`torchperfd.model.own_commands.script_command`, with the arguments TARGET REQUESTS ANSWERS.
"""

import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Final, Protocol

from torchperfd_cli.bench.settings import (
    LoaderDescription,
    LoaderSetting,
    Outcome,
    RestOfStep,
    Speed,
    Unusable,
)
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

# A measurement may take five times as long as asked for, after its workers have started.
_LONGEST: Final = 6.0


class LoaderMeasurer(Protocol):
    """Measures settings of one loader."""

    def facts(self) -> LoaderDescription:
        """Return what the loader is like."""
        ...

    def measure(self, setting: LoaderSetting, share: float = 1.0) -> Outcome:
        """Measure a setting once, for a share of the usual time."""
        ...

    def rest_of_step(self, setting: LoaderSetting) -> RestOfStep | None:
        """Measure a step without its input; None where it cannot be had."""
        ...


class LoaderProcess:
    """Measures in a process of its own.

    Args:
        target: As ``module:name``: a DataLoader, or a function without arguments that returns one.
        seconds: To measure each setting for.
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
        """Return what the loader is like; starts the process.

        Raises:
            FactoryError: The loader could not be made.
        """
        self._started()
        assert self._facts is not None
        return self._facts

    def measure(self, setting: LoaderSetting, share: float = 1.0) -> Outcome:
        """Measure a setting once, for a share of the usual time.

        Raises:
            FactoryError: A new process was needed, and could not make the loader.
        """
        answer = self._ask(setting, self._seconds * share)
        return Speed.from_dict(answer["speed"]) if "speed" in answer else Unusable(str(answer["unusable"]))

    def rest_of_step(self, setting: LoaderSetting) -> RestOfStep | None:
        """Measure a step without its input; None where it cannot be had."""
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
        facts = answer["facts"]
        self._facts = LoaderDescription(**{**facts, "current": LoaderSetting(**facts["current"])})
        return process

    def _ask(self, setting: LoaderSetting, seconds: float, *, ceiling: bool = False) -> dict[str, Any]:
        request = {"setting": asdict(setting), "seconds": seconds, "ceiling": ceiling}
        try:
            return self._started().ask(request, self._timeout + _LONGEST * seconds)
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

    from torchperfd_cli.bench.ceiling import measure_ceiling
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
