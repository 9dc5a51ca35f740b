"""An attempt at a capture: prepare, acknowledge, commit, and one outcome of each rank."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from torchperfd_daemon.captures.manifest import CaptureRecord, CaptureState
from torchperfd_daemon.captures.rank_attempts import (
    NO_ANSWER,
    Ack,
    Participant,
    RankAttempt,
    Result,
    Turns,
    failure,
)
from torchperfd_daemon.captures.schedule import When, agree
from torchperfd_daemon.errors import TorchperfdError

_PREPARE_TIMEOUT_S: Final = 20.0
_TICK_S: Final = 0.25


@dataclass(frozen=True, slots=True)
class Progress:
    """A change worth telling.

    Attributes:
        record: The capture; it changes further.
        folder: Where its files are, or will be once it is no longer queued.
        timed_out: It failed for want of steps.
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
        folder: Where its files go.
        turns: Where the ranks' answers arrive.
        max_bytes: Most that one rank's trace may have; 0 for any.
        save: Writes the manifest as it is.
    """

    def __init__(
        self,
        record: CaptureRecord,
        folder: Path,
        turns: Turns,
        max_bytes: int,
        save: Callable[[CaptureRecord], None],
    ) -> None:
        self._record = record
        self._folder = folder
        self._all = turns
        self._max_bytes = max_bytes
        self._save = save
        self._turns: list[RankAttempt] = []
        self.refusal = ""
        """Why no steps could be agreed on."""
        self.timed_out = False
        self.wrong_moment = False
        """Some rank would do better at another moment."""

    async def play(
        self, participants: list[Participant], when: When, deadline: float
    ) -> AsyncIterator[Progress]:
        """Conduct it until ``deadline`` of the loop's clock, yielding each change before the end."""
        loop = asyncio.get_running_loop()
        record = self._record
        record.state, record.reason, record.step_range = CaptureState.PREPARING, "", None
        record.ended_at = 0.0
        self._turns = turns = self._all.begin(record.capture_id, participants, record.ranks)
        # Should this daemon die, those who list captures shall know who took part.
        self._save(record)
        try:
            for turn in turns:
                turn.participant.prepare(record.capture_id, record.options, self._folder, self._max_bytes)
            yield self.progress()
            await _wait([turn.ack for turn in turns], min(deadline, loop.time() + _PREPARE_TIMEOUT_S))
            for turn in turns:
                if not turn.ack.done():
                    turn.participant.cancel(record.capture_id, NO_ANSWER)
            ready = [turn for turn in turns if turn.read_ack()]
            if ready and self._commit(ready, when):
                yield self.progress()
                async for progress in self._results(ready, deadline):
                    yield progress
            self._conclude(ready)
        finally:
            self._all.end(record.capture_id, turns)

    def progress(self) -> Progress:
        """Return how far it is."""
        steps = {turn.trace.rank: turn.participant.steps_seen for turn in self._turns}
        return Progress(self._record, self._folder, self.timed_out, steps)

    def _commit(self, ready: list[RankAttempt], when: When) -> bool:
        """Tell the ready ranks which steps; return whether there are any."""
        record = self._record
        if record.cancelled_by:
            self.refusal = record.cancellation
        else:
            try:
                acks = {turn.trace.rank: turn.ack.result() for turn in ready}
                record.step_range = agree(when, acks, record.options.steps)
            except TorchperfdError as error:
                self.refusal = str(error)
        if record.step_range is None:
            for turn in ready:
                turn.participant.cancel(record.capture_id, self.refusal)
                turn.settle(failure(self.refusal))
            return False
        start, end = record.step_range
        record.options = replace(record.options, steps=end - start)
        record.state = CaptureState.ARMED
        for turn in ready:
            turn.trace.state = CaptureState.ARMED
            turn.trace.pause_seconds = turn.ack.result().pause_seconds_per_step * (end - start)
            turn.participant.commit(record.capture_id, start, end - start)
        self._save(record)
        return True

    async def _results(self, ready: list[RankAttempt], deadline: float) -> AsyncIterator[Progress]:
        """Wait for the outcomes, telling how far the ranks are."""
        loop = asyncio.get_running_loop()
        told = self.progress().next_steps
        while pending := [turn.result for turn in ready if not turn.result.done()]:
            if loop.time() >= deadline:
                return
            await _wait(pending, min(deadline, loop.time() + _TICK_S))
            progress = self.progress()
            done = sum(result.done() for result in pending)
            if done < len(pending) and (done or progress.next_steps != told):
                self._read_results(ready)
                told = progress.next_steps
                yield progress

    def _conclude(self, ready: list[RankAttempt]) -> None:
        """Give those up that are overdue, and note what has become of all."""
        for turn in ready:
            if not turn.result.done():
                self.timed_out = True
                turn.participant.cancel(self._record.capture_id, turn.overdue())
                turn.settle(failure(turn.overdue()))
        self._read_results(ready)
        self.wrong_moment = any(turn.result.result().retry for turn in ready)

    def _read_results(self, ready: list[RankAttempt]) -> None:
        for turn in ready:
            turn.read_result(self._record.step_range or (0, 0))


async def _wait(
    futures: list["asyncio.Future[Ack]"] | list["asyncio.Future[Result]"], deadline: float
) -> None:
    if futures:
        await asyncio.wait(futures, timeout=max(0.0, deadline - asyncio.get_running_loop().time()))
