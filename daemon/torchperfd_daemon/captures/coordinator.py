"""The agreement: all chosen ranks profile the same training steps, or it is said who did not.

Prepare, acknowledge, commit. Each rank does its slow preparations and says how far it
is; then one start step, safely ahead of the farthest rank, is committed to all. There is
no barrier: a rank that is late or gone costs itself only, and is named.
"""

import asyncio
import logging
import math
import secrets
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from torchperfd_daemon.captures.catalog import Catalog
from torchperfd_daemon.captures.manifest import (
    FILE_NAME,
    CaptureOptions,
    CaptureRecord,
    CaptureState,
    RankTrace,
    first_reason,
    overall_state,
)
from torchperfd_daemon.errors import TorchperfdError

log = logging.getLogger("torchperfd.captures")

_PREPARE_TIMEOUT_S: Final = 20.0
_ATTEMPTS: Final = 3
_MARGIN_S: Final = 0.25
_MARGIN_STEPS: Final = 2


@dataclass(frozen=True, slots=True)
class Ack:
    """A rank's answer to prepare: ready or why not, and how far it is."""

    ready: bool
    reason: str
    next_step: int
    step_seconds: float


@dataclass(frozen=True, slots=True)
class Result:
    """A rank's outcome."""

    ok: bool
    reason: str
    retry: bool
    start_step: int
    file: str
    bytes: int
    sha256: str


class Participant(Protocol):
    """A connected rank, as far as captures are concerned."""

    @property
    def rank(self) -> int:
        """Its rank."""

    @property
    def steps_seen(self) -> int:
        """Training steps it has reported so far."""

    def prepare(self, capture_id: str, options: CaptureOptions, directory: Path) -> None:
        """Ask it to get ready."""

    def commit(self, capture_id: str, start_step: int) -> None:
        """Tell it when."""

    def cancel(self, capture_id: str, reason: str) -> None:
        """Tell it to give up."""


@dataclass(slots=True)
class CaptureCounts:
    """What captures have come to since the daemon started; read by the metrics page."""

    requests: dict[tuple[str, str], int] = field(default_factory=dict)
    bytes: int = 0
    active: int = 0
    last_success_unix_seconds: float = 0.0

    def count(self, record: CaptureRecord, now: float) -> None:
        """Add a capture that has ended."""
        key = (record.trigger, record.state.value)
        self.requests[key] = self.requests.get(key, 0) + 1
        self.bytes += sum(rank.bytes for rank in record.ranks)
        if record.state is CaptureState.COMPLETE:
            self.last_success_unix_seconds = now


@dataclass(frozen=True, slots=True)
class Progress:
    """A change worth telling; ``timed_out`` when the capture failed for want of steps."""

    record: CaptureRecord
    folder: Path
    timed_out: bool = False


class _RankTurn:
    """One rank's part in one attempt."""

    def __init__(self, participant: Participant, trace: RankTrace) -> None:
        self.participant = participant
        self.trace = trace
        loop = asyncio.get_running_loop()
        self.ack: asyncio.Future[Ack] = loop.create_future()
        self.result: asyncio.Future[Result] = loop.create_future()
        self.steps_at_start = participant.steps_seen

    def settle(self, result: Result) -> None:
        if not self.ack.done():
            self.ack.set_result(Ack(False, result.reason, 0, 0.0))
        if not self.result.done():
            self.result.set_result(result)


class Coordinator:
    """Conducts captures; at most one per run at a time.

    Args:
        catalog: Where traces and manifests go.
        wall: Unix seconds.
    """

    def __init__(self, catalog: Catalog, wall: Callable[[], float] = time.time) -> None:
        self._catalog = catalog
        self._wall = wall
        self._turns: dict[tuple[str, int], _RankTurn] = {}
        self._busy_runs: set[str] = set()
        self.counts = CaptureCounts()

    async def capture(
        self, run: str, participants: list[Participant], options: CaptureOptions, timeout: float
    ) -> AsyncIterator[Progress]:
        """Capture the next steps of some ranks of a run, yielding each change; the last one has ended.

        Raises:
            TorchperfdError: Another capture of this run is in progress, or nothing can be written.
        """
        if run in self._busy_runs:
            raise TorchperfdError(f"a capture of run {run} is in progress", "wait until it has ended")
        self._busy_runs.add(run)
        self.counts.active += 1
        now = self._wall()
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now))
        record = CaptureRecord(
            capture_id=f"{stamp}-{secrets.token_hex(3)}",
            run=run,
            trigger="command",
            requested_at=now,
            options=options,
            ranks=[RankTrace(participant.rank) for participant in participants],
        )
        try:
            folder = self._catalog.create(record.capture_id)
            deadline = asyncio.get_running_loop().time() + timeout
            for attempt in range(1, _ATTEMPTS + 1):
                again = False
                async for progress, again in self._attempt(record, folder, participants, deadline):
                    if record.state.ended:
                        if again and attempt < _ATTEMPTS:
                            continue
                        # Before it is told: who asked may go away upon hearing it.
                        self._save(record)
                    yield progress
                if not again:
                    break
        finally:
            if not record.state.ended:
                self._abandon(record, participants)
            self.counts.count(record, self._wall())
            self.counts.active -= 1
            self._busy_runs.discard(run)

    def on_ack(self, capture_id: str, rank: int, ack: Ack) -> None:
        """A rank has answered prepare."""
        turn = self._turns.get((capture_id, rank))
        if turn is not None and not turn.ack.done():
            turn.ack.set_result(ack)

    def on_result(self, capture_id: str, rank: int, result: Result) -> None:
        """A rank's capture has ended."""
        turn = self._turns.get((capture_id, rank))
        if turn is not None:
            turn.settle(result)

    def on_departure(self, participant: Participant, reason: str) -> None:
        """A rank has gone: whatever it took part in will not come."""
        for turn in list(self._turns.values()):
            if turn.participant is participant:
                turn.settle(_failure(reason))

    def adopt(self, capture_id: str, run: str, options: CaptureOptions, rank: int, result: Result) -> None:
        """Write the manifest of a capture that a training script made of itself.

        Raises:
            NoSuchTargetError: The id could not be one.
        """
        record = CaptureRecord(
            capture_id=capture_id,
            run=run,
            trigger="script",
            requested_at=self._wall(),
            step_range=(result.start_step, result.start_step + options.steps),
            options=options,
            ranks=[RankTrace(rank)],
        )
        _apply(record.ranks[0], result)
        record.state = overall_state(record.ranks)
        record.reason = first_reason(record.ranks)
        folder = self._catalog.folder(capture_id)
        if folder.is_dir() and not (folder / FILE_NAME).exists():
            self._save(record)
        self.counts.count(record, self._wall())

    async def _attempt(
        self, record: CaptureRecord, folder: Path, participants: list[Participant], deadline: float
    ) -> AsyncIterator[tuple[Progress, bool]]:
        """Try once; yields (change, whether another attempt is worth it)."""
        loop = asyncio.get_running_loop()
        turns = []
        for participant, trace in zip(participants, record.ranks, strict=True):
            trace.state, trace.reason = CaptureState.PREPARING, ""
            turn = _RankTurn(participant, trace)
            self._turns[record.capture_id, trace.rank] = turn
            turns.append(turn)
            participant.prepare(record.capture_id, record.options, folder)
        record.state, record.reason, record.step_range = CaptureState.PREPARING, "", None
        yield Progress(record, folder), False
        try:
            await _all([turn.ack for turn in turns], min(deadline, loop.time() + _PREPARE_TIMEOUT_S))
            ready = self._read_acks(record.capture_id, turns)
            if ready:
                start = _start_step([turn.ack.result() for turn in ready])
                record.step_range = (start, start + record.options.steps)
                record.state = CaptureState.ARMED
                for turn in ready:
                    turn.trace.state = CaptureState.ARMED
                    turn.participant.commit(record.capture_id, start)
                yield Progress(record, folder), False
                await _all([turn.result for turn in ready], deadline)
            timed_out = self._read_results(record, ready)
        finally:
            for turn in turns:
                self._turns.pop((record.capture_id, turn.trace.rank), None)
        self._catalog.enforce_cap(record)
        record.state = overall_state(record.ranks)
        record.reason = first_reason(record.ranks)
        retry = record.state is CaptureState.FAILED and any(
            turn.result.done() and turn.result.result().retry for turn in ready
        )
        yield Progress(record, folder, timed_out), retry and loop.time() < deadline

    def _read_acks(self, capture_id: str, turns: list[_RankTurn]) -> list[_RankTurn]:
        ready = []
        for turn in turns:
            if not turn.ack.done():
                turn.trace.state = CaptureState.FAILED
                turn.trace.reason = "did not answer; the process may be stopped or overloaded"
                turn.participant.cancel(capture_id, turn.trace.reason)
            elif not turn.ack.result().ready:
                turn.trace.state = CaptureState.FAILED
                turn.trace.reason = turn.ack.result().reason
            else:
                ready.append(turn)
        return ready

    def _read_results(self, record: CaptureRecord, ready: list[_RankTurn]) -> bool:
        timed_out = False
        for turn in ready:
            if turn.result.done():
                _apply(turn.trace, turn.result.result())
                continue
            timed_out = True
            made = turn.participant.steps_seen - turn.steps_at_start
            reason = (
                f"made only {made} training steps in time"
                if made
                else "makes no training steps, so there is nothing to capture"
            )
            turn.participant.cancel(record.capture_id, reason)
            _apply(turn.trace, _failure(reason))
        return timed_out

    def _abandon(self, record: CaptureRecord, participants: list[Participant]) -> None:
        """Whoever asked has gone away before the end."""
        record.state = CaptureState.FAILED
        record.reason = "cancelled"
        for participant in participants:
            participant.cancel(record.capture_id, record.reason)
            self._turns.pop((record.capture_id, participant.rank), None)
        for trace in record.ranks:
            if not trace.state.ended:
                trace.state, trace.reason = CaptureState.FAILED, record.reason
        if self._catalog.folder(record.capture_id).is_dir():
            self._save(record)

    def _save(self, record: CaptureRecord) -> None:
        """Write the manifest; without it the capture can still be read from its ranks' own."""
        try:
            self._catalog.save(record)
        except TorchperfdError as error:
            log.warning("capture %s: %s", record.capture_id, error)


async def _all(
    futures: list["asyncio.Future[Ack]"] | list["asyncio.Future[Result]"], deadline: float
) -> None:
    if futures:
        await asyncio.wait(futures, timeout=max(0.0, deadline - asyncio.get_running_loop().time()))


def _start_step(acks: list[Ack]) -> int:
    """Return a step that every rank has yet to begin: a quarter second and two steps ahead."""
    farthest = max(ack.next_step for ack in acks)
    fastest = min((ack.step_seconds for ack in acks if ack.step_seconds > 0), default=_MARGIN_S)
    return farthest + _MARGIN_STEPS + math.ceil(_MARGIN_S / fastest)


def _failure(reason: str) -> Result:
    return Result(False, reason, False, 0, "", 0, "")


def _apply(trace: RankTrace, result: Result) -> None:
    trace.state = CaptureState.COMPLETE if result.ok else CaptureState.FAILED
    trace.reason = result.reason
    trace.file, trace.bytes, trace.sha256 = result.file, result.bytes, result.sha256
