"""Turns: one rank's part in one attempt at a capture, from prepare to its outcome."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from torchperfd_daemon.captures.manifest import CaptureOptions, CaptureState, RankFacts, RankTrace

NO_ANSWER: Final = "did not answer; the process may be stopped or overloaded"


@dataclass(frozen=True, slots=True)
class Ack:
    """A rank's answer to prepare: ready or why not, and how far it is.

    ``pause_seconds_per_step`` is how long training will pause for each captured step; 0 if unknown.
    """

    ready: bool
    reason: str
    next_step: int
    step_seconds: float
    pause_seconds_per_step: float = 0.0


@dataclass(frozen=True, slots=True)
class Result:
    """A rank's outcome; ``steps`` is how many it believes were agreed on, 0 when it does not say."""

    ok: bool
    reason: str
    retry: bool
    start_step: int
    file: str
    bytes: int
    sha256: str
    steps: int = 0
    steps_made: int = 0
    pause_seconds: float = 0.0


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
        """Tell it when, and how long."""

    def cancel(self, capture_id: str, reason: str) -> None:
        """Tell it to give up."""


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
        """Take the outcome, unless there is one; a rank that has not acknowledged will not."""
        if not self.ack.done():
            self.ack.set_result(Ack(False, result.reason, 0, 0.0))
        if not self.result.done():
            self.result.set_result(result)

    def read_ack(self) -> bool:
        """Return whether the rank is ready; note in its trace why not."""
        if self.ack.done() and self.ack.result().ready:
            return True
        self.trace.state = CaptureState.FAILED
        self.trace.reason = self.ack.result().reason if self.ack.done() else NO_ANSWER
        return False

    def read_result(self, agreed: tuple[int, int]) -> None:
        """Note the outcome, if there is one yet, in the trace."""
        if not self.result.done():
            return
        # Of another node's clock more is known by now than when its rank was asked.
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


class Turns:
    """The turns that are being waited for."""

    def __init__(self) -> None:
        self._turns: dict[tuple[str, int], RankAttempt] = {}

    def begin(
        self, capture_id: str, participants: list[Participant], traces: list[RankTrace]
    ) -> list[RankAttempt]:
        """Return a fresh turn of each participant."""
        turns = [RankAttempt(*pair) for pair in zip(participants, traces, strict=True)]
        for turn in turns:
            turn.trace.state, turn.trace.reason = CaptureState.PREPARING, ""
            self._turns[capture_id, turn.trace.rank] = turn
        return turns

    def end(self, capture_id: str, turns: Iterable[RankAttempt]) -> None:
        """Wait for these no more."""
        for turn in turns:
            self._turns.pop((capture_id, turn.trace.rank), None)

    def of(self, capture_id: str) -> list[RankAttempt]:
        """Return the turns of one capture."""
        return [turn for (name, _), turn in self._turns.items() if name == capture_id]

    def find(self, capture_id: str, rank: int) -> RankAttempt | None:
        """Return one rank's turn; None when nobody waits for it."""
        return self._turns.get((capture_id, rank))

    def depart(self, participant: Participant, reason: str) -> None:
        """A rank has gone: whatever it took part in will not come."""
        for turn in list(self._turns.values()):
            if turn.participant is participant:
                turn.settle(failure(reason))

    def __len__(self) -> int:
        return len(self._turns)


def failure(reason: str) -> Result:
    """Return the outcome of a rank that has none of its own."""
    return Result(False, reason, False, 0, "", 0, "")


def apply(trace: RankTrace, result: Result) -> None:
    """Note an outcome."""
    trace.state = CaptureState.COMPLETE if result.ok else CaptureState.FAILED
    trace.reason = result.reason
    trace.file, trace.bytes, trace.sha256 = result.file, result.bytes, result.sha256
    trace.pause_seconds = result.pause_seconds
    trace.steps_made = result.steps_made or (result.steps if result.ok else 0)
