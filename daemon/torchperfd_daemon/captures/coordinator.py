"""Agreement on steps: all chosen ranks profile the same training steps; ranks that did not are named.

Prepare, acknowledge, commit. Each rank does its slow preparations and reports its step. Then one
start step, safely ahead of the farthest rank, is committed to all. There is no barrier: a rank
that is late or has left delays no other rank, and is named.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from torchperfd._version import __version__
from torchperfd.model.capture_options import CaptureKind
from torchperfd.model.verdict_document import SettledAdvice
from torchperfd.v1.contract import new_capture_id
from torchperfd_daemon.captures.attempt import SOON, Attempt, Progress, QueueEntry, RunQueue, When
from torchperfd_daemon.captures.catalog import Catalog
from torchperfd_daemon.captures.manifest import (
    FILE_NAME,
    CaptureOptions,
    CaptureRecord,
    CaptureState,
    RankFacts,
    RankTrace,
    first_reason,
    overall_state,
)
from torchperfd_daemon.captures.rank_attempts import Ack, Participant, PendingAttempts, Result, apply, failure
from torchperfd_daemon.errors import NoSuchTargetError, TorchperfdError

log = logging.getLogger("torchperfd.captures")

_AFTER_AUTOMATIC: Final = "begins when the run's automatic capture has ended"
_ATTEMPTS: Final = 3
_CANCEL_GRACE_S: Final = 5.0
"""How long the ranks have to report their outcome after a capture is cancelled."""
_SLACK_S: Final = 10.0
"""How long after its deadline a capture may still be in progress."""


@dataclass(slots=True)
class CaptureCounts:
    """Counts of captures since the daemon started; read by the metrics page."""

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


class Coordinator:
    """Conducts captures; one per run at a time, the others wait or are refused."""

    def __init__(self, catalog: Catalog, wall: Callable[[], float] = time.time) -> None:
        self._catalog = catalog
        self._wall = wall
        self._pending = PendingAttempts()
        self._queue = RunQueue()
        self._live: dict[str, tuple[CaptureRecord, QueueEntry]] = {}
        self.counts = CaptureCounts()
        self.advice_of: Callable[[str], SettledAdvice | None] = lambda _: None
        """Returns what a run is advised on its loaders, which is kept with each of its traces."""

    @property
    def live(self) -> list[str]:
        """The ids of the captures that are queued or in progress."""
        return [*self._live]

    @property
    def live_records(self) -> list[CaptureRecord]:
        """The captures that are queued or in progress."""
        return [record for record, _ in self._live.values()]

    def live_record(self, capture_id: str) -> CaptureRecord | None:
        """Return a capture that is queued or in progress; None where there is none of that id."""
        record, _ = self._live.get(capture_id, (None, None))
        return record

    def live_of(self, run: str) -> list[str]:
        """Return the ids of a run's captures that are queued or in progress."""
        return [record.capture_id for record, _ in self._live.values() if record.run == run]

    @property
    def is_idle(self) -> bool:
        """Whether no capture is queued or in progress, and no rank's answer is awaited."""
        return not (self._pending or self._queue or self._live or self.counts.active)

    def is_capturing(self, run: str) -> bool:
        return self._queue.is_busy(run)

    async def capture(
        self,
        run: str,
        participants: list[Participant],
        options: CaptureOptions,
        timeout: float,
        *,
        trigger: str = "command",
        when: When = SOON,
        queue: bool = False,
        choose_again: Callable[[], list[Participant]] | None = None,
    ) -> AsyncIterator[Progress]:
        """Capture steps of some ranks of a run, yielding each change; the last one has ended.

        Args:
            timeout: Seconds for all of it, from its start.
            trigger: What requested it, for the manifest.
            queue: Wait for a capture in progress; it begins once that has ended. For one that the run makes
                by itself, every other one waits.
            choose_again: Returns the participants after such a wait: they may have changed.

        Raises:
            TorchperfdError: Another capture of this run is in progress, or nothing can be written.
        """
        entry = self._queue.enter(run, wait=queue, automatic=options.automatic)
        now = self._wall()
        record = CaptureRecord(
            capture_id=new_capture_id(now),
            run=run,
            trigger=trigger,
            requested_at=now,
            options=options,
            ranks=_traces(participants),
            job_name=next((each.facts.job_name for each in participants), ""),
            world_size=max((each.facts.world_size for each in participants), default=0),
            daemon_version=__version__,
        )
        folder = self._catalog.folder(record.capture_id)
        self._live[record.capture_id] = record, entry
        self.counts.active += 1
        try:
            if not entry.woken.is_set():
                record.state = CaptureState.QUEUED
                record.reason = "" if queue else _AFTER_AUTOMATIC
                yield Progress(record, folder)
                await entry.woken.wait()
                if choose_again is not None and not record.cancelled_by:
                    participants = choose_again()
                    record.ranks = _traces(participants)
            if record.cancelled_by:
                self._end(record)
                yield Progress(record, folder)
                return
            self._catalog.create(record.capture_id)
            record.ends_by = self._wall() + timeout + _SLACK_S
            async for progress in self._conduct(record, folder, participants, when, timeout):
                yield progress
        finally:
            if not record.state.ended:
                self._abandon(record, participants)
            self.counts.count(record, self._wall())
            self.counts.active -= 1
            del self._live[record.capture_id]
            self._queue.leave(entry)

    def users(self, capture_id: str) -> set[int]:
        """Return the users of the ranks of a capture that is queued or in progress, as far as known.

        Raises:
            NoSuchTargetError: There is none of this name, or it has ended.
        """
        record, _ = self._find_live(capture_id)
        return record.users

    def cancel(self, capture_id: str, cancelled_by: str = "command") -> None:
        """Cancel a capture that is queued or in progress; its caller receives the outcome.

        Raises:
            NoSuchTargetError: There is none of this name, or it has ended.
        """
        record, entry = self._find_live(capture_id)
        if record.cancelled_by or record.state.ended:
            return
        record.cancelled_by = cancelled_by
        entry.woken.set()
        for rank_attempt in self._pending.of(capture_id):
            if rank_attempt.result.done():
                continue
            rank_attempt.participant.cancel(capture_id, record.cancellation)
            if record.state is CaptureState.PREPARING:
                rank_attempt.settle(failure(record.cancellation))
            else:
                # The rank may just have written its trace, so it still reports its own outcome.
                loop = asyncio.get_running_loop()
                loop.call_later(_CANCEL_GRACE_S, rank_attempt.settle, failure(record.cancellation))

    def _find_live(self, capture_id: str) -> tuple[CaptureRecord, QueueEntry]:
        if capture_id not in self._live:
            raise NoSuchTargetError(
                f"no capture {capture_id[:80]!r} is queued or in progress",
                "list them with `torchperfd captures list`",
            )
        return self._live[capture_id]

    @contextlib.contextmanager
    def reserve_run(self, run: str) -> Iterator[PendingAttempts]:
        """Reserve a run for a capture that another node conducts; yield the attempts that await answers.

        A capture that the run makes by itself may be in progress: the ranks wait for its end.

        Raises:
            TorchperfdError: A capture of this run is in progress here.
        """
        entry = self._queue.enter(run, wait=False)
        self.counts.active += 1
        try:
            yield self._pending
        finally:
            self.counts.active -= 1
            self._queue.leave(entry)

    def on_ack(self, capture_id: str, rank: int, ack: Ack) -> None:
        """A rank has answered prepare."""
        rank_attempt = self._pending.find(capture_id, rank)
        if rank_attempt is not None and not rank_attempt.ack.done():
            rank_attempt.ack.set_result(ack)

    def on_result(self, capture_id: str, rank: int, result: Result) -> None:
        """A rank's capture has ended."""
        rank_attempt = self._pending.find(capture_id, rank)
        if rank_attempt is not None:
            rank_attempt.settle(result)
        elif capture_id not in self._live:
            self._close(capture_id)

    def has_file(self, capture_id: str, name: str) -> bool:
        """Return whether a capture's folder has a file."""
        with contextlib.suppress(TorchperfdError):
            self._catalog.open(capture_id, name).close()
            return True
        return False

    def on_departure(self, participant: Participant, reason: str) -> None:
        """Fail the attempts of a rank that has left."""
        self._pending.depart(participant, reason)

    def adopt(
        self,
        capture_id: str,
        run: str,
        options: CaptureOptions,
        rank: int,
        result: Result,
        facts: RankFacts | None = None,
        owner: int | None = None,
    ) -> None:
        """Write the manifest of a capture that a training script made of itself.

        Args:
            owner: The script's user, as reported by the kernel: only that user's folder gets a manifest.

        Raises:
            NoSuchTargetError: The id could not be one.
        """
        facts = facts or RankFacts()
        record = CaptureRecord(
            capture_id=capture_id,
            run=run,
            trigger="script",
            requested_at=self._wall(),
            step_range=(result.start_step, result.start_step + options.steps),
            options=options,
            ranks=[RankTrace.of(rank, facts)],
            job_name=facts.job_name,
            world_size=facts.world_size,
            daemon_version=__version__,
        )
        apply(record.ranks[0], result)
        self._end(record)
        found = self._catalog.found(capture_id)
        if found is not None and owner not in (None, found.owner):
            log.warning("capture %s belongs to user %s, not to user %s", capture_id, found.owner, owner)
        elif found is not None and not (self._catalog.folder(capture_id) / FILE_NAME).exists():
            self._save(record)
        self.counts.count(record, self._wall())

    async def _conduct(
        self,
        record: CaptureRecord,
        folder: Path,
        participants: list[Participant],
        when: When,
        timeout: float,
    ) -> AsyncIterator[Progress]:
        """Make attempts until one succeeds, at least in part, or another attempt would not help."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        share = self._catalog.quota.capture_bytes // max(1, len(participants))
        # A step that was asked for by number does not come again.
        left = _ATTEMPTS if when.at_step is None else 1
        while left:
            left -= 1
            attempt = Attempt(record, folder, self._pending, share, self._save)
            async for progress in attempt.run(participants, when, deadline):
                yield progress
            self._catalog.enforce_cap(record)
            self._end(record, attempt.refusal)
            failed = record.state is CaptureState.FAILED and not record.cancelled_by
            if not (failed and attempt.wrong_moment and loop.time() < deadline):
                break
        # Saved before it is yielded: the caller may leave when it receives the last change.
        self._save(record)
        yield attempt.progress()

    def _end(self, record: CaptureRecord, refusal: str = "") -> None:
        """Record the capture's outcome; ``refusal`` is why no rank could take part."""
        record.state = overall_state(record.ranks)
        record.reason = refusal or first_reason(record.ranks)
        if record.cancelled_by:
            for trace in record.ranks:
                if not trace.state.ended:
                    trace.state, trace.reason = CaptureState.FAILED, record.cancellation
            if record.state is not CaptureState.COMPLETE:
                record.reason = record.cancellation
        record.ended_at = self._wall()
        if record.options.kind is CaptureKind.TRACE and record.state is not CaptureState.FAILED:
            record.loader_advice = self.advice_of(record.run)

    def _abandon(self, record: CaptureRecord, participants: list[Participant]) -> None:
        """End a capture whose caller has left."""
        record.cancelled_by = record.cancelled_by or "caller"
        for participant in participants:
            participant.cancel(record.capture_id, record.cancellation)
        self._pending.end(record.capture_id, self._pending.of(record.capture_id))
        self._end(record)
        if self._catalog.folder(record.capture_id).is_dir():
            self._save(record)

    def _close(self, capture_id: str) -> None:
        """Write the outcome of a capture that an earlier daemon began, once its ranks have ended."""
        with contextlib.suppress(TorchperfdError):
            found = self._catalog.found(capture_id)
            if found is None or found.closed or found.record is None or not found.record.state.ended:
                return
            found.record.ended_at = found.record.ended_at or self._wall()
            self._save(found.record)

    def _save(self, record: CaptureRecord) -> None:
        """Write the manifest; without it the capture can still be read from its ranks' own."""
        try:
            self._catalog.save(record)
        except TorchperfdError as error:
            log.warning("capture %s: %s", record.capture_id, error)


def _traces(participants: list[Participant]) -> list[RankTrace]:
    return [RankTrace.of(participant.rank, participant.facts) for participant in participants]
