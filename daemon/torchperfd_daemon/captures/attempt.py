"""An attempt at a capture: its place in the run's queue, the steps agreed on, and one outcome per rank.

Captures of one run happen one after another, in the order of their requests. An attempt prepares the ranks,
takes their acknowledgements, and commits.
"""

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from torchperfd.v1.contract import LONG_PAUSE_S
from torchperfd_daemon.captures.manifest import CaptureRecord, CaptureState
from torchperfd_daemon.captures.rank_attempts import (
    NO_ANSWER,
    Ack,
    Participant,
    PendingAttempts,
    RankAttempt,
    Result,
    failure,
)
from torchperfd_daemon.errors import TorchperfdError

_MAX_QUEUED: Final = 16


class BusyError(TorchperfdError):
    """A capture of this run is in progress."""


@dataclass(eq=False, slots=True)
class QueueEntry:
    """A capture's entry in the queue of a run.

    Attributes:
        automatic: The run makes it by itself.
        woken: Set once it is the first, or was cancelled.
    """

    run: str
    automatic: bool = False
    woken: asyncio.Event = field(default_factory=asyncio.Event)


class RunQueue:
    """One queue per run."""

    def __init__(self) -> None:
        self._lines: dict[str, deque[QueueEntry]] = {}

    def enter(self, run: str, *, wait: bool, automatic: bool = False) -> QueueEntry:
        """Return an entry at the end of a run's queue; pass it to :meth:`leave` in any case.

        Args:
            wait: Wait for any capture. Only for one that the run makes by itself does every other one wait.

        Raises:
            BusyError: The queue is not empty, and the caller would not wait.
            TorchperfdError: Too many wait already.
        """
        line = self._lines.get(run, ())
        if line and not wait and (automatic or not all(each.automatic for each in line)):
            raise BusyError(
                f"a capture of run {run} is in progress", "wait until it has ended, or ask with --queue"
            )
        if len(line) > _MAX_QUEUED:
            raise TorchperfdError(
                f"{_MAX_QUEUED} captures of run {run} are queued already",
                "cancel some with `torchperfd captures cancel ID`",
            )
        entry = QueueEntry(run, automatic)
        line = self._lines.setdefault(run, deque())
        line.append(entry)
        line[0].woken.set()
        return entry

    def is_busy(self, run: str) -> bool:
        return bool(self._lines.get(run))

    def leave(self, entry: QueueEntry) -> None:
        """Remove an entry; if it was the first, wake the next."""
        line = self._lines[entry.run]
        line.remove(entry)
        if line:
            line[0].woken.set()
        else:
            del self._lines[entry.run]

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))


MAX_STEPS: Final = 1000
"""Of one capture."""

_MARGIN_S: Final = 0.25
_MARGIN_STEPS: Final = 2


@dataclass(frozen=True, slots=True)
class When:
    """Which steps were asked for; by default the next ones that all ranks can reach.

    Attributes:
        at_step: Start exactly there, counting from 0.
        duration_seconds: Take as many steps as last so long, 1 to 1000; 0 for the number in the options.
    """

    at_step: int | None = None
    duration_seconds: float = 0.0


SOON: Final = When()


def agree(
    when: When, acks: Mapping[int, Ack], steps: int, longest_pause_seconds: float = math.inf
) -> tuple[int, int]:
    """Return the first step to capture and the first one after, which every rank has yet to begin.

    Args:
        acks: How far each ready rank is; at least one.
        steps: How many steps unless ``when`` has a duration.
        longest_pause_seconds: Fewer steps are taken if training would pause for longer when they end.

    Raises:
        TorchperfdError: The chosen step is past or too near, steps have no length yet, or the capture of one
            step would pause training for too long.
    """
    start = start_step(list(acks.values()))
    if when.at_step is not None:
        if when.at_step < start:
            rank, farthest = max(acks.items(), key=lambda each: each[1].next_step)
            raise TorchperfdError(
                f"step {when.at_step} is past or too near: rank {rank} is at step {farthest.next_step}",
                f"ask for step {start} or a later one",
            )
        start = when.at_step
    if when.duration_seconds:
        means = [ack.step_seconds for ack in acks.values() if ack.step_seconds > 0]
        if not means:
            raise TorchperfdError("no step has ended yet, so the length of a step is unknown", "use --steps")
        steps = min(MAX_STEPS, max(1, round(when.duration_seconds * len(means) / sum(means))))
    pause = max(ack.pause_seconds_per_step for ack in acks.values())
    if pause * steps > longest_pause_seconds:
        steps = int(longest_pause_seconds / pause)
        if not steps:
            raise TorchperfdError(
                f"training would pause for about {pause:.1f} s when one step was captured",
                "ask for a capture yourself",
            )
    return start, start + steps


def start_step(acks: list[Ack]) -> int:
    """Return a step that every rank has yet to begin: a quarter second and two steps ahead."""
    farthest = max(ack.next_step for ack in acks)
    fastest = min((ack.step_seconds for ack in acks if ack.step_seconds > 0), default=_MARGIN_S)
    return farthest + _MARGIN_STEPS + math.ceil(_MARGIN_S / fastest)


_PREPARE_TIMEOUT_S: Final = 20.0
_TICK_S: Final = 0.25


@dataclass(frozen=True, slots=True)
class Progress:
    """A change to report.

    Attributes:
        record: The capture; it changes further.
        folder: Where its files are, or will be once it is no longer queued.
        timed_out: It failed because the ranks made too few steps in time.
        next_steps: Rank to the training step in progress, as last reported.
    """

    record: CaptureRecord
    folder: Path
    timed_out: bool = False
    next_steps: dict[int, int] = field(default_factory=dict)


class Attempt:
    """One try. Afterwards every rank of the record has ended.

    Args:
        record: The capture; kept up to date.
        max_bytes: Most that one rank's trace may have; 0 for any.
    """

    def __init__(
        self,
        record: CaptureRecord,
        folder: Path,
        attempts: PendingAttempts,
        max_bytes: int,
        save: Callable[[CaptureRecord], None],
    ) -> None:
        self._record = record
        self._folder = folder
        self._pending = attempts
        self._max_bytes = max_bytes
        self._save = save
        self._attempts: list[RankAttempt] = []
        self.refusal = ""
        """Why no steps could be agreed on."""
        self.timed_out = False
        self.wrong_moment = False
        """Some rank asks to be captured at another moment."""

    async def run(
        self, participants: list[Participant], when: When, deadline: float
    ) -> AsyncIterator[Progress]:
        """Run the attempt until ``deadline`` of the loop's clock, yielding each change before the end."""
        loop = asyncio.get_running_loop()
        record = self._record
        record.state, record.reason, record.step_range = CaptureState.PREPARING, "", None
        record.ended_at = 0.0
        self._attempts = attempts = self._pending.begin(record.capture_id, participants, record.ranks)
        # If this daemon dies, the manifest still lists the ranks that took part.
        self._save(record)
        try:
            for attempt in attempts:
                attempt.participant.prepare(record.capture_id, record.options, self._folder, self._max_bytes)
            yield self.progress()
            await _wait(
                [attempt.ack for attempt in attempts], min(deadline, loop.time() + _PREPARE_TIMEOUT_S)
            )
            for attempt in attempts:
                if not attempt.ack.done():
                    attempt.participant.cancel(record.capture_id, NO_ANSWER)
            ready = [attempt for attempt in attempts if attempt.read_ack()]
            if ready and self._commit(ready, when):
                yield self.progress()
                async for progress in self._results(ready, deadline):
                    yield progress
            self._conclude(ready)
        finally:
            self._pending.end(record.capture_id, attempts)

    def progress(self) -> Progress:
        """Return how far it is."""
        steps = {attempt.trace.rank: attempt.participant.steps_seen for attempt in self._attempts}
        return Progress(self._record, self._folder, self.timed_out, steps)

    def _commit(self, ready: list[RankAttempt], when: When) -> bool:
        """Send the agreed steps to the ready ranks; return whether steps were agreed."""
        record = self._record
        if record.cancelled_by:
            self.refusal = record.cancellation
        else:
            try:
                acks = {attempt.trace.rank: attempt.ack.result() for attempt in ready}
                longest = LONG_PAUSE_S if record.options.automatic else math.inf
                record.step_range = agree(when, acks, record.options.steps, longest)
            except TorchperfdError as error:
                self.refusal = str(error)
        if record.step_range is None:
            for attempt in ready:
                attempt.participant.cancel(record.capture_id, self.refusal)
                attempt.settle(failure(self.refusal))
            return False
        start, end = record.step_range
        record.options = replace(record.options, steps=end - start)
        record.state = CaptureState.ARMED
        for attempt in ready:
            attempt.trace.state = CaptureState.ARMED
            attempt.trace.pause_seconds = attempt.ack.result().pause_seconds_per_step * (end - start)
            attempt.participant.commit(record.capture_id, start, end - start)
        self._save(record)
        return True

    async def _results(self, ready: list[RankAttempt], deadline: float) -> AsyncIterator[Progress]:
        """Wait for the outcomes, yielding the ranks' progress."""
        loop = asyncio.get_running_loop()
        reported = self.progress().next_steps
        while pending := [attempt.result for attempt in ready if not attempt.result.done()]:
            if loop.time() >= deadline:
                return
            await _wait(pending, min(deadline, loop.time() + _TICK_S))
            progress = self.progress()
            done = sum(result.done() for result in pending)
            if done < len(pending) and (done or progress.next_steps != reported):
                self._read_results(ready)
                reported = progress.next_steps
                yield progress

    def _conclude(self, ready: list[RankAttempt]) -> None:
        """Cancel overdue ranks, and record the outcome of every rank."""
        for attempt in ready:
            if not attempt.result.done():
                self.timed_out = True
                attempt.participant.cancel(self._record.capture_id, attempt.overdue())
                attempt.settle(failure(attempt.overdue()))
        self._read_results(ready)
        self.wrong_moment = any(attempt.result.result().retry for attempt in ready)

    def _read_results(self, ready: list[RankAttempt]) -> None:
        for attempt in ready:
            attempt.read_result(self._record.step_range or (0, 0))


async def _wait(
    futures: list["asyncio.Future[Ack]"] | list["asyncio.Future[Result]"], deadline: float
) -> None:
    if futures:
        await asyncio.wait(futures, timeout=max(0.0, deadline - asyncio.get_running_loop().time()))
