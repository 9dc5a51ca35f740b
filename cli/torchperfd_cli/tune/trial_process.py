"""Runs trials of a script: alone, or two side by side that are measured in turn."""

import dataclasses
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import msgspec

from torchperfd.errors import TorchperfdError
from torchperfd_cli.bench.worker_process import WorkerFailedError, WorkerProcess
from torchperfd_cli.tune.trial import Change, Trial

PAIRS_PER_PROCESS: Final = 6
"""After so many pairs both processes are started anew: some are slower for as long as they live."""
_PAIRS_PER_FRESH_PROCESS: Final = 2
"""One in each order."""
_GRACE_S: Final = 15.0
"""A process that misses its own deadline, because the script holds the interpreter, has so much longer."""
_PAIR_SHARE: Final = 0.25
"""Part of the time for one run that each measurement of a pair takes."""


PairStream: TypeAlias = Generator[tuple[float, float], None, None]
"""Yields the seconds of a step without changes and with them, without end."""


class TrialFailedError(TorchperfdError):
    """A run of the script gave no measurement."""

    def __init__(self, problem: str, remedy: str = "", exit_code: int = 1) -> None:
        super().__init__(problem, remedy)
        self.exit_code = exit_code


class ScriptTrials:
    """Runs a script again and again."""

    def __init__(self, script: "TrialScript") -> None:
        self._script = script
        self._can_stand_by = True

    def run(self, changes: Sequence[Change]) -> Trial:
        with _Process(self._script, changes) as process:
            early = process.start()
            trial = process.measure(1.0) if early is None else early
        # A device may have no memory for two.
        self._can_stand_by &= not trial.facts.uses_cuda
        return trial

    def pairs(self, without: Sequence[Change], with_it: Sequence[Change]) -> PairStream:
        return self._pairs(without, with_it, side_by_side)

    def fresh_pairs(self, without: Sequence[Change], with_it: Sequence[Change]) -> PairStream:
        return self._pairs(without, with_it, lambda first, second, _: [fresh_pair(first, second)])

    def _pairs(
        self,
        without: Sequence[Change],
        with_it: Sequence[Change],
        measured: "Callable[[ChangedScript, ChangedScript, int], Iterable[tuple[float, float]]]",
    ) -> PairStream:
        """Yield pairs of two processes that live side by side: one is held while the other is measured.

        Where that cannot be, each measurement is a run of its own.
        """
        count = 0
        while self._can_stand_by:
            try:
                for pair in measured((self._script, without), (self._script, with_it), count):
                    yield pair
                    count += 1
            except TrialFailedError:
                # A port, a lock or memory that only one of them can have; or it has too few steps.
                self._can_stand_by = False
        while True:
            order = (with_it, without) if count % 2 else (without, with_it)
            seconds = [self.run(changes).step_seconds for changes in order]
            yield (seconds[1], seconds[0]) if count % 2 else (seconds[0], seconds[1])
            count += 1


@dataclass(frozen=True, slots=True)
class TrialScript:
    """What to run, and how long.

    Attributes:
        target: A file, or a module.
        is_module: The target is a module, as with ``python -m``.
        steps: The fewest steps to measure, where the script makes so many.
    """

    target: str
    arguments: tuple[str, ...]
    is_module: bool
    seconds: float
    steps: int
    timeout: float


ChangedScript: TypeAlias = tuple[TrialScript, Sequence[Change]]


def side_by_side(
    first: ChangedScript, second: ChangedScript, count: int = 0, most: int = PAIRS_PER_PROCESS
) -> Iterator[tuple[float, float]]:
    """Run two scripts with changes in two processes, and hold one while the other is measured.

    Args:
        count: Pairs that were measured before.

    Yields:
        The steps of both, in seconds; fewer than ``most`` pairs where a script ends.

    Raises:
        TrialFailedError: One of them gave nothing to measure.
    """
    with _Process(*first) as one, _Process(*second) as other:
        for process in (one, other):
            if process.start() is not None:
                raise TrialFailedError("the script is too short")
        for number in range(count, count + most):
            # In alternating order, so that a machine that becomes slower favours neither.
            order = (other, one) if number % 2 else (one, other)
            seconds = {process: process.measure(_PAIR_SHARE).step_seconds for process in order}
            if one.has_ended or other.has_ended:
                return
            yield seconds[one], seconds[other]


def fresh_pair(first: ChangedScript, second: ChangedScript) -> tuple[float, float]:
    """Return the steps of two scripts, in seconds, from two new processes, each measured first once.

    How fast a process is depends on where its memory happens to lie, for as long as it lives. Only the
    ratios of several such pairs show how far that matters.

    Raises:
        TrialFailedError: One of them gave nothing to measure.
    """
    pairs = list(side_by_side(first, second, most=_PAIRS_PER_FRESH_PROCESS))
    if not pairs:
        raise TrialFailedError("the script is too short")
    one, other = zip(*pairs, strict=True)
    return statistics.geometric_mean(one), statistics.geometric_mean(other)


class _Process:
    """One process that runs the script, and is held unless it is measured.

    Attributes:
        has_ended: The script has ended by itself.
    """

    def __init__(self, script: TrialScript, changes: Sequence[Change]) -> None:
        self._script = script
        self.has_ended = False
        # Sockets of workers, which are killed before they could remove them. Their paths must be short.
        self._folder = tempfile.TemporaryDirectory(prefix="tune-", ignore_cleanup_errors=True)
        specification = {
            **dataclasses.asdict(script),
            "changes": [each.to_dict() for each in changes],
            "folder": self._folder.name,
        }
        # The order of sets of strings, so that two runs train the same.
        environment = {"PYTHONHASHSEED": "0", **os.environ}
        self._process = WorkerProcess(
            "torchperfd_cli.tune.trial_worker", [json.dumps(specification)], environment=environment
        )

    def __enter__(self) -> "_Process":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.close()
        self._folder.cleanup()

    def start(self) -> Trial | None:
        """Wait until the script trains; return what was measured where it has ended already."""
        answer = self._ask(None)
        return None if "ready" in answer else self._read(answer)

    def measure(self, share: float) -> Trial:
        """Measure steps for a share of the usual time."""
        steps = max(2, round(share * self._script.steps))
        return self._read(self._ask({"steps": steps, "seconds": share * self._script.seconds}))

    def _ask(self, request: dict[str, Any] | None) -> dict[str, Any]:
        try:
            answer = self._process.ask(request, self._script.timeout + _GRACE_S)
        except WorkerFailedError as error:
            raise TrialFailedError(str(error)) from error
        if "failed" in answer:
            raise TrialFailedError(answer["failed"], exit_code=answer.get("exit_code", 1))
        return answer

    def _read(self, answer: dict[str, Any]) -> Trial:
        self.has_ended = answer.get("has_ended", False)
        return msgspec.convert(answer, Trial)
