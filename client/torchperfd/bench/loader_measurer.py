"""What measures settings of a DataLoader: a process, started anew after each that had to be killed."""

from dataclasses import asdict
from typing import Any, Final, Protocol

from torchperfd.bench.settings import LoaderDescription, LoaderSetting, Outcome, RestOfStep, Speed, Unusable
from torchperfd.bench.worker_process import FactoryError, WorkerFailedError, WorkerProcess

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
        process = WorkerProcess("torchperfd.bench.loader_worker", [self._target])
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
