"""The agreement: all chosen ranks profile the same training steps, or it is said who did not.

Prepare, acknowledge, commit. Each rank does its slow preparations and says how far it
is; then one start step, safely ahead of the farthest rank, is committed to all. There is
no barrier: a rank that is late or gone costs itself only, and is named.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Final

from torchperfd._version import __version__
from torchperfd_daemon.captures.attempt import Attempt, Progress
from torchperfd_daemon.captures.catalog import Catalog
from torchperfd_daemon.captures.counts import CaptureCounts
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
from torchperfd_daemon.captures.queue import Place, RunQueue
from torchperfd_daemon.captures.rank_attempts import Ack, Participant, Result, Turns, apply, failure
from torchperfd_daemon.captures.schedule import SOON, When
from torchperfd_daemon.errors import NoSuchTargetError, TorchperfdError

log = logging.getLogger("torchperfd.captures")

_ATTEMPTS: Final = 3
_CANCEL_GRACE_S: Final = 5.0
"""How long the ranks have to say what has become of them once a capture is cancelled."""
_SLACK_S: Final = 10.0
"""How long after its deadline a capture may still be at it."""


class Coordinator:
    """Conducts captures; one per run at a time, the others wait or are refused.

    Args:
        catalog: Where traces and manifests go.
        wall: Unix seconds.
    """

    def __init__(self, catalog: Catalog, wall: Callable[[], float] = time.time) -> None:
        self._catalog = catalog
        self._wall = wall
        self._turns = Turns()
        self._queue = RunQueue()
        self._live: dict[str, tuple[CaptureRecord, Place]] = {}
        self.counts = CaptureCounts()

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
            run: The run's name.
            participants: The ranks.
            options: What to record.
            timeout: Seconds for all of it, from its start.
            trigger: What asks for it, as the manifest shall say.
            when: Which steps.
            queue: Wait for a capture in progress; it begins once that has ended.
            choose_again: Returns the participants after such a wait: they may have changed.

        Raises:
            TorchperfdError: Another capture of this run is in progress, or nothing can be written.
        """
        place = self._queue.enter(run, wait=queue)
        now = self._wall()
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now))
        record = CaptureRecord(
            capture_id=f"{stamp}-{secrets.token_hex(3)}",
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
        self._live[record.capture_id] = record, place
        self.counts.active += 1
        try:
            if not place.first:
                record.state = CaptureState.QUEUED
                yield Progress(record, folder)
                await place.wait()
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
            self._queue.leave(place)

    def users(self, capture_id: str) -> set[int]:
        """Return the users of the ranks of a capture that is queued or in progress, as far as known.

        Raises:
            NoSuchTargetError: There is none of this name, or it has ended.
        """
        record, _ = self._find_live(capture_id)
        return record.users

    def cancel(self, capture_id: str, who: str = "command") -> None:
        """Give a capture up that is queued or in progress; whoever asked for it is told its end.

        Raises:
            NoSuchTargetError: There is none of this name, or it has ended.
        """
        record, place = self._find_live(capture_id)
        if record.cancelled_by or record.state.ended:
            return
        record.cancelled_by = who
        place.move()
        for turn in self._turns.of(capture_id):
            if turn.result.done():
                continue
            turn.participant.cancel(capture_id, record.cancellation)
            if record.state is CaptureState.PREPARING:
                turn.settle(failure(record.cancellation))
            else:
                # It may just have written its trace: what becomes of it is the rank's to say.
                loop = asyncio.get_running_loop()
                loop.call_later(_CANCEL_GRACE_S, turn.settle, failure(record.cancellation))

    def _find_live(self, capture_id: str) -> tuple[CaptureRecord, Place]:
        if capture_id not in self._live:
            raise NoSuchTargetError(
                f"no capture {capture_id[:80]!r} is queued or in progress",
                "list them with `torchperfd captures list`",
            )
        return self._live[capture_id]

    @contextlib.contextmanager
    def taking_part(self, run: str) -> Iterator[Turns]:
        """Make room for a capture that another node conducts; yields where the ranks' answers arrive.

        Raises:
            TorchperfdError: A capture of this run is in progress here.
        """
        place = self._queue.enter(run, wait=False)
        self.counts.active += 1
        try:
            yield self._turns
        finally:
            self.counts.active -= 1
            self._queue.leave(place)

    def on_ack(self, capture_id: str, rank: int, ack: Ack) -> None:
        """A rank has answered prepare."""
        turn = self._turns.find(capture_id, rank)
        if turn is not None and not turn.ack.done():
            turn.ack.set_result(ack)

    def on_result(self, capture_id: str, rank: int, result: Result) -> None:
        """A rank's capture has ended."""
        turn = self._turns.find(capture_id, rank)
        if turn is not None:
            turn.settle(result)
        elif capture_id not in self._live:
            self._close(capture_id)

    def on_departure(self, participant: Participant, reason: str) -> None:
        """A rank has gone: whatever it took part in will not come."""
        self._turns.depart(participant, reason)

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
            owner: The script's user, as the kernel says: only that user's folder gets a manifest.

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
        folder = self._catalog.folder(capture_id)
        try:
            made_by = folder.lstat().st_uid
        except OSError:
            made_by = None
        if made_by is not None and owner not in (None, made_by):
            log.warning("capture %s is not user %s's, but user %s's", capture_id, owner, made_by)
        elif folder.is_dir() and not (folder / FILE_NAME).exists():
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
        """Attempt it until it succeeds, at least in part, or another attempt is of no use."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        share = self._catalog.quota.capture_bytes // max(1, len(participants))
        # A step that was asked for by number does not come again.
        left = _ATTEMPTS if when.at_step is None else 1
        while left:
            left -= 1
            attempt = Attempt(record, folder, self._turns, share, self._save)
            async for progress in attempt.play(participants, when, deadline):
                yield progress
            self._catalog.enforce_cap(record)
            self._end(record, attempt.refusal)
            failed = record.state is CaptureState.FAILED and not record.cancelled_by
            if not (failed and attempt.wrong_moment and loop.time() < deadline):
                break
        # Before it is told: who asked may go away upon hearing it.
        self._save(record)
        yield attempt.progress()

    def _end(self, record: CaptureRecord, refusal: str = "") -> None:
        """Note what the capture has come to; ``refusal`` is why no rank could take part."""
        record.state = overall_state(record.ranks)
        record.reason = refusal or first_reason(record.ranks)
        if record.cancelled_by:
            for trace in record.ranks:
                if not trace.state.ended:
                    trace.state, trace.reason = CaptureState.FAILED, record.cancellation
            if record.state is not CaptureState.COMPLETE:
                record.reason = record.cancellation
        record.ended_at = self._wall()

    def _abandon(self, record: CaptureRecord, participants: list[Participant]) -> None:
        """Whoever asked has gone away before the end."""
        record.cancelled_by = record.cancelled_by or "caller"
        for participant in participants:
            participant.cancel(record.capture_id, record.cancellation)
        self._turns.end(record.capture_id, self._turns.of(record.capture_id))
        self._end(record)
        if self._catalog.folder(record.capture_id).is_dir():
            self._save(record)

    def _close(self, capture_id: str) -> None:
        """Write the end of a capture that a daemon before this one began, once its ranks have ended."""
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
