"""One rank's part in one attempt at a capture, from prepare to its outcome."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Protocol

from torchperfd.model.messages import Count, Name, Sentence, StepIndex, Text
from torchperfd_daemon.captures.manifest import CaptureOptions, CaptureState, RankFacts, RankTrace

NO_ANSWER: Final = "did not answer; the process may be stopped or overloaded"


_SHORTEST_STEP_S: Final = 1e-6
_LONGEST_STEP_S: Final = 1e6
_LONGEST_PAUSE_S: Final = 86_400.0


def _step(seconds: float) -> float:
    return min(max(seconds, _SHORTEST_STEP_S), _LONGEST_STEP_S) if seconds > 0 else 0.0


def _pause(seconds: float) -> float:
    return seconds if 0 < seconds < _LONGEST_PAUSE_S else 0.0


def _base_name(file: str) -> str:
    return file.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class Ack:
    """A rank's answer to prepare: whether it is ready, else why not, and its step.

    ``pause_seconds_per_step`` is how long training will pause for each captured step; 0 if unknown.
    """

    ready: bool
    reason: Sentence
    next_step: StepIndex
    step_seconds: Annotated[float, _step]
    pause_seconds_per_step: Annotated[float, _pause] = 0.0


@dataclass(frozen=True, slots=True)
class Result:
    """A rank's outcome; ``steps`` is how many it believes were agreed on, 0 when it does not report that."""

    ok: bool
    reason: Sentence
    retry: bool
    start_step: StepIndex
    file: Annotated[str, Text(100), _base_name]
    bytes: Count
    sha256: Name
    steps: int = 0
    steps_made: int = 0
    pause_seconds: Annotated[float, _pause] = 0.0
    launches: Count = 0
    kernels: Count = 0


class Participant(Protocol):
    """A connected rank, as far as captures are concerned."""

    @property
    def rank(self) -> int:
        """Its rank."""

    @property
    def steps_seen(self) -> int:
        """Training steps it has reported so far."""

    @property
    def facts(self) -> RankFacts:
        """Which process it is, and what runs in it."""

    def prepare(self, capture_id: str, options: CaptureOptions, directory: Path, max_bytes: int) -> None:
        """Ask it to get ready; a trace of more than ``max_bytes`` is not kept, 0 is no limit."""

    def commit(self, capture_id: str, start_step: int, steps: int) -> None:
        """Send the first step, and the number of steps."""

    def cancel(self, capture_id: str, reason: str) -> None:
        """Ask it to cancel."""


class RankAttempt:
    """One rank's part in one attempt. Both futures end, whatever becomes of the rank."""

    def __init__(self, participant: Participant, trace: RankTrace) -> None:
        self.participant = participant
        self.trace = trace
        loop = asyncio.get_running_loop()
        self.ack: asyncio.Future[Ack] = loop.create_future()
        self.result: asyncio.Future[Result] = loop.create_future()
        self.steps_at_start = participant.steps_seen

    def settle(self, result: Result) -> None:
        """Set the outcome, unless there is one; a missing acknowledgement is set to the same failure."""
        if not self.ack.done():
            self.ack.set_result(Ack(False, result.reason, 0, 0.0))
        if not self.result.done():
            self.result.set_result(result)

    def read_ack(self) -> bool:
        """Return whether the rank is ready; if not, record the reason in its trace."""
        if self.ack.done() and self.ack.result().ready:
            return True
        self.trace.state = CaptureState.FAILED
        self.trace.reason = self.ack.result().reason if self.ack.done() else NO_ANSWER
        return False

    def read_result(self, agreed: tuple[int, int]) -> None:
        """Record the outcome, if there is one yet, in the trace."""
        if not self.result.done():
            return
        # The offset of another node's clock is more accurate now than at the request.
        self.trace.clock_offset_ns = self.participant.facts.clock_offset_ns
        result = self.result.result()
        found = (result.start_step, result.start_step + result.steps)
        if result.ok and result.steps and found != agreed:
            result = failure(f"it captured steps {found[0]} to {found[1] - 1}; its client may be too old")
        apply(self.trace, result)

    def overdue(self) -> str:
        """Return why there is no outcome although the time is up."""
        made = self.participant.steps_seen - self.steps_at_start
        if made:
            return f"made only {made} training steps in time"
        return "makes no training steps, so there is nothing to capture"


class PendingAttempts:
    """The attempts whose answers are awaited."""

    def __init__(self) -> None:
        self._attempts: dict[tuple[str, int], RankAttempt] = {}

    def begin(
        self, capture_id: str, participants: list[Participant], traces: list[RankTrace]
    ) -> list[RankAttempt]:
        attempts = [RankAttempt(*pair) for pair in zip(participants, traces, strict=True)]
        for attempt in attempts:
            attempt.trace.state, attempt.trace.reason = CaptureState.PREPARING, ""
            self._attempts[capture_id, attempt.trace.rank] = attempt
        return attempts

    def end(self, capture_id: str, attempts: Iterable[RankAttempt]) -> None:
        """Stop waiting for these."""
        for attempt in attempts:
            self._attempts.pop((capture_id, attempt.trace.rank), None)

    def of(self, capture_id: str) -> list[RankAttempt]:
        return [attempt for (name, _), attempt in self._attempts.items() if name == capture_id]

    def find(self, capture_id: str, rank: int) -> RankAttempt | None:
        """Return one rank's attempt; None when none is awaited."""
        return self._attempts.get((capture_id, rank))

    def depart(self, participant: Participant, reason: str) -> None:
        """Fail the attempts of a rank that has left."""
        for attempt in list(self._attempts.values()):
            if attempt.participant is participant:
                attempt.settle(failure(reason))

    def __len__(self) -> int:
        return len(self._attempts)


def failure(reason: str) -> Result:
    """Return the outcome of a rank that has none of its own."""
    return Result(False, reason, False, 0, "", 0, "")


def apply(trace: RankTrace, result: Result) -> None:
    """Record an outcome in a trace."""
    trace.state = CaptureState.COMPLETE if result.ok else CaptureState.FAILED
    trace.reason = result.reason
    trace.file, trace.bytes, trace.sha256 = result.file, result.bytes, result.sha256
    trace.pause_seconds = result.pause_seconds
    trace.launches, trace.kernels = result.launches, result.kernels
    trace.steps_made = result.steps_made or (result.steps if result.ok else 0)
