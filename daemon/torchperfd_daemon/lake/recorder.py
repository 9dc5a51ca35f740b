"""Collects rows for the lake from the daemon's parts: what is new since the last time."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from torchperfd_daemon.captures.manifest import CaptureRecord
from torchperfd_daemon.diagnosis.verdict import Cause, Verdict
from torchperfd_daemon.goodput.totals import RunGoodput
from torchperfd_daemon.lake.journal import Marked
from torchperfd_daemon.lake.rows import (
    SPAN_S,
    Named,
    Source,
    capture_row,
    goodput_mark,
    goodput_row,
    gpu_uuid_of,
    gpus_of,
    run_row,
    step_rows,
    verdict_rows,
)
from torchperfd_daemon.observer.mean_step import verdict_on_mean_step
from torchperfd_daemon.store.store import Rank, Store

REPEAT_S: Final = 3600.0
"""A verdict that stands, and goodput, have a row so often."""
_LATE_S: Final = 10
"""How long the steps of ten seconds may still arrive after these are over."""
_ENDED_S: Final = 30.0
"""How long a run's ranks must have been away before the run has ended; a process may connect again."""
_MAX_CAPTURES: Final = 1000

Mark = Callable[[str], str | None]


@dataclass(frozen=True, slots=True)
class Sources:
    """What the recorder reads.

    Attributes:
        verdicts: Returns the published verdicts on a run.
        final_verdict: Returns the verdict on a run that has ended.
        lost_seconds: Returns what each cause has cost each run so far.
        goodput: Returns the goodput of the runs that were active last; None if it is not kept.
        look_up_owners: Looks up the names of users. It may block, and runs on a thread.
        owner_of: Returns the name of a user that was looked up.
        gpu_model: Returns the model of the GPU with a UUID; empty if it is not known.
    """

    store: Store
    verdicts: Callable[[str], Sequence[Verdict]]
    final_verdict: Callable[[str], Verdict | None]
    lost_seconds: Callable[[], Mapping[str, Mapping[Cause, float]]]
    goodput: Callable[[], Awaitable[list[RunGoodput]]] | None
    look_up_owners: Callable[[set[int]], None]
    owner_of: Callable[[int | None], str]
    gpu_model: Callable[[str], str] = lambda _: ""


@dataclass(slots=True)
class _Watched:
    """A run that has, or had, ranks here.

    Attributes:
        through: By rank, the last second whose steps have a row.
        since: When the present verdicts were first seen.
        lost: What each cause had cost the run then.
        total: What each has cost it by now.
        recorded: The mark of its newest row, if it has one.
        away_since: Since when none of its ranks is connected; None while one is.
    """

    ranks: list[Rank]
    since: float
    through: dict[Rank, int] = field(default_factory=dict)
    verdicts: tuple[Verdict, ...] = ()
    lost: dict[str, float] = field(default_factory=dict)
    total: dict[str, float] = field(default_factory=dict)
    recorded: str = ""
    away_since: float | None = None
    has_ended: bool = False


class Recorder:
    """Follows the runs of the store. Call :meth:`collect` on the event loop.

    Args:
        node: Host name.
    """

    def __init__(self, node: str, sources: Sources) -> None:
        self._node = node
        self._from = sources
        self._runs: dict[str, _Watched] = {}
        self._captures: list[CaptureRecord] = []
        self._goodput_at = 0.0

    def capture_ended(self, record: CaptureRecord) -> None:
        """Have a capture that has ended recorded at the next time."""
        if len(self._captures) < _MAX_CAPTURES:
            self._captures.append(record)

    async def collect(self, now: float, *, final: bool = False) -> Callable[[Mark], Marked]:
        """Return what is new, as the journal takes it.

        Args:
            now: Unix seconds.
            final: The daemon ends: what is in progress is recorded as far as it is.
        """
        found: list[Named] = []
        once: dict[str, Named] = {}
        present = self._from.store.runs()
        lost = self._from.lost_seconds()
        for run, ranks in present.items():
            watched = self._runs.setdefault(run, _Watched(ranks, now))
            watched.ranks = ranks
        await asyncio.to_thread(self._from.look_up_owners, self._owners())
        for run, watched in list(self._runs.items()):
            source = self._source(run, watched.ranks)
            _end(watched, now, is_gone=final or run not in present)
            self._add_steps(found, source, watched, now, is_over=final or watched.has_ended)
            if run in lost:
                watched.total = {cause.value: seconds for cause, seconds in lost[run].items()}
            self._add_verdicts(found, source, watched, now, is_over=final)
            key = _run_mark(watched.ranks)
            if watched.has_ended and watched.recorded != key:
                watched.recorded = key
                verdict = self._from.final_verdict(run) or verdict_on_mean_step(run, watched.ranks)
                device = self._from.gpu_model(gpu_uuid_of(watched.ranks))
                once[key] = run_row(source, watched.ranks, verdict, now, device)
            if run not in present:
                del self._runs[run]
        found += [capture_row(self._of_capture(each), each) for each in self._captures]
        self._captures.clear()
        goodput = await self._goodput(now, is_due=final or bool(once))
        return lambda mark: self._marked(found, once, goodput, mark)

    def _owners(self) -> set[int]:
        ranks = [rank.process.uid for watched in self._runs.values() for rank in watched.ranks]
        traces = [trace.uid for record in self._captures for trace in record.ranks]
        return {uid for uid in (*ranks, *traces) if uid is not None}

    def _source(self, run: str, ranks: Sequence[Rank]) -> Source:
        owner = self._from.owner_of(ranks[0].process.uid)
        return Source(self._node, run, ranks[0].identity.job_name, owner)

    def _of_capture(self, record: CaptureRecord) -> Source:
        uid = next((trace.uid for trace in record.ranks if trace.uid is not None), None)
        return Source(self._node, record.run, record.job_name, self._from.owner_of(uid))

    def _add_steps(
        self, found: list[Named], source: Source, watched: _Watched, now: float, *, is_over: bool
    ) -> None:
        last = int(now) if is_over else int(now - _LATE_S) // SPAN_S * SPAN_S - 1
        through = watched.through
        watched.through = {}
        for rank in watched.ranks:
            done = through.get(rank, -1)
            seconds = rank.seconds.since(done, until=last)
            found += step_rows(source, rank.identity.rank, seconds)
            watched.through[rank] = max(done, last)

    def _add_verdicts(
        self,
        found: list[Named],
        source: Source,
        watched: _Watched,
        now: float,
        *,
        is_over: bool,
    ) -> None:
        verdicts = tuple(self._from.verdicts(source.run))
        is_same = [(each.cause, each.rank) for each in verdicts] == [
            (each.cause, each.rank) for each in watched.verdicts
        ]
        if is_same and verdicts:
            watched.verdicts = verdicts
        if is_same and not is_over and now - watched.since < REPEAT_S:
            return
        if watched.verdicts and now > watched.since:
            cost = {name: each - watched.lost.get(name, 0.0) for name, each in watched.total.items()}
            span = (watched.since, now)
            found += verdict_rows(source, watched.verdicts, span, cost, gpus_of(watched.ranks))
        watched.verdicts, watched.since, watched.lost = verdicts, now, watched.total

    async def _goodput(self, now: float, *, is_due: bool) -> list[RunGoodput]:
        if self._from.goodput is None or (not is_due and now - self._goodput_at < REPEAT_S):
            return []
        self._goodput_at = now
        return await self._from.goodput()

    def _marked(
        self, found: list[Named], once: Mapping[str, Named], goodput: Sequence[RunGoodput], mark: Mark
    ) -> Marked:
        """Add the rows that depend on what the journal has already."""
        marked = Marked(list(found))
        for key, row in once.items():
            if mark(key) is None:
                marked.rows.append(row)
                marked.marks[key] = ""
        for run in goodput:
            self._add_goodput(marked, run, mark)
        return marked

    def _add_goodput(self, marked: Marked, run: RunGoodput, mark: Mark) -> None:
        watched = self._runs.get(run.run)
        for rank in run.ranks:
            key = f"goodput {run.run} {rank.rank}"
            known = json.loads(mark(key) or '["", "", {}]')
            job, owner, before = known
            if watched is not None:
                source = self._source(run.run, watched.ranks)
                job, owner = source.job, source.owner
            row = goodput_row(Source(self._node, run.run, job, owner), rank, before)
            if row is not None:
                marked.rows.append(row)
                marked.marks[key] = json.dumps([job, owner, goodput_mark(rank)])


def _end(watched: _Watched, now: float, *, is_gone: bool) -> None:
    """Note since when a run's ranks are away, and whether it has thereby ended."""
    if any(rank.connected for rank in watched.ranks):
        watched.away_since, watched.has_ended = None, False
        return
    watched.away_since = watched.away_since or now
    watched.has_ended = is_gone or now - watched.away_since >= _ENDED_S


def _run_mark(ranks: Sequence[Rank]) -> str:
    """Return the mark of a run's processes, which are recorded once."""
    identity = ranks[0].identity
    return f"run {identity.run} {identity.pid_namespace} {identity.pid} {identity.process_start_ticks}"
