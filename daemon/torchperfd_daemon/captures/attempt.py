"""An attempt at a capture: prepare, acknowledge, commit, and one outcome per rank."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable
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
from torchperfd_daemon.captures.schedule import When, agree
from torchperfd_daemon.errors import TorchperfdError

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
