"""Runs as the daemons of the last day saw them: when each began, what happened, and those that ended."""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from google.protobuf.message import DecodeError

from torchperfd.model.verdict_document import verdict_to_document
from torchperfd.v1 import control_pb2
from torchperfd_daemon.background import WorkerHealth, until_next_round
from torchperfd_daemon.diagnosis.verdict import Verdict
from torchperfd_daemon.service.translate_diagnosis import run_verdict_to_message
from torchperfd_daemon.store.model import State
from torchperfd_daemon.store.store import Rank, Store
from torchperfd_daemon.views import history
from torchperfd_daemon.views.history import sparkline
from torchperfd_daemon.web.access import Access
from torchperfd_daemon.web.run_rows import KeptRun, RunRow, RunsFile, Sparkline, ended_state, outcome_of

log = logging.getLogger("torchperfd.http")

MAX_FINISHED: Final = 100
MAX_MARKS: Final = 256
SAVE_EVERY_S: Final = 30.0

_DAY_S: Final = 86_400.0
_KINDS: Final = {State.CHECKPOINTING: "checkpoint", State.VALIDATING: "validation"}


@dataclass(slots=True)
class _Seen:
    """A run that has, or had, ranks here."""

    first_seen: float
    marks: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=MAX_MARKS))
    open: dict[tuple[int, State], dict[str, Any]] = field(default_factory=dict)
    cause: str = ""
    ended_at: float = 0.0
    row: RunRow | None = None
    verdict: control_pb2.Verdict | None = None
    users: list[int | None] = field(default_factory=list)


class PastRuns:
    """Samples the store once a second.

    Args:
        verdict: Returns the published verdict on a run.
        file: Keeps the runs when the daemon ends; None for a daemon that keeps nothing.
    """

    def __init__(
        self,
        store: Store,
        verdict: Callable[[str], Verdict | None] = lambda _: None,
        wall: Callable[[], float] = time.time,
        file: RunsFile | None = None,
    ) -> None:
        self._store = store
        self._verdict = verdict
        self._wall = wall
        self._runs: dict[str, _Seen] = {}
        self.on_mark: Callable[[str, dict[str, Any]], None] | None = None
        """Called with each new mark, and again when the time that it marks has ended."""
        self.health = WorkerHealth("past runs")
        self._file = file
        self._save_at = self._wall() + SAVE_EVERY_S
        if file is not None:
            self._restore(file.load())

    async def run(self) -> None:
        """Sample until cancelled, and save at times."""
        while True:
            await asyncio.sleep(until_next_round())
            try:
                self.sample()
                if self._file is not None and self._wall() >= self._save_at:
                    self._save_at = self._wall() + SAVE_EVERY_S
                    if self._store.runs():
                        await asyncio.to_thread(self._file.save, self.kept())
                self.health.succeeded(self._wall())
            except Exception:
                # A failure here must not end the daemon.
                if self.health.failed():
                    log.exception("runs could not be sampled; trying again in a second")

    def close(self) -> None:
        """Save; blocks during the write."""
        if self._file is not None and self._runs:
            self._file.save(self.kept())

    def kept(self) -> list[KeptRun]:
        """Return what is to be known of the runs after a restart, the newest first.

        A run that has ranks here is kept as it would be if they had left: it may end while no daemon runs.
        """
        here, now = self._store.runs(), self._wall()
        found: list[KeptRun] = []
        for name, seen in self._runs.items():
            row, verdict, users = seen.row, seen.verdict, seen.users
            if not seen.ended_at and name in here:
                row, verdict, users = self._as_ended(name, seen, here[name], now)
            if row is not None:
                open_marks = [id(mark) for mark in seen.open.values()]
                marks = [
                    {**mark, "end_unix_seconds": row.ended_unix_seconds} if id(mark) in open_marks else mark
                    for mark in seen.marks
                ]
                packed = b"" if verdict is None else verdict.SerializeToString()
                found.append(KeptRun(row, marks, packed, users))
        return sorted(found, key=lambda run: -run.row.ended_unix_seconds)

    def _restore(self, runs: list[KeptRun]) -> None:
        now = self._wall()
        for run in runs:
            row, verdict = run.row, None
            # Of a clock that was set, or of damage: it would never be a day old.
            if not 0 < row.ended_unix_seconds <= now + SAVE_EVERY_S:
                continue
            with contextlib.suppress(DecodeError):
                verdict = control_pb2.Verdict.FromString(run.verdict) if run.verdict else None
            self._runs[row.run] = _Seen(
                row.started_unix_seconds,
                deque(run.marks, maxlen=MAX_MARKS),
                cause=verdict.cause if verdict is not None else "",
                ended_at=row.ended_unix_seconds,
                row=row,
                verdict=verdict,
                users=run.users,
            )
        self._forget(now)

    def sample(self) -> None:
        """Look at all runs once."""
        now = self._wall()
        runs = self._store.runs()
        for name, ranks in runs.items():
            seen = self._runs.get(name)
            if seen is None:
                seen = self._runs[name] = _Seen(now)
            connected = any(rank.connected for rank in ranks)
            if connected and seen.ended_at:
                # The same name again, as after a restart.
                seen.ended_at = 0.0
            self._mark_states(name, seen, ranks, now)
            self._mark_verdict(name, seen, now)
            if not connected and not seen.ended_at:
                self._finish(name, seen, ranks, now)
        for name, seen in list(self._runs.items()):
            if name not in runs and not seen.ended_at:
                # Without a row there is nothing to show of it.
                del self._runs[name]
        self._forget(now)

    def first_seen(self, run: str) -> float | None:
        """Return when this daemon first saw a run, in Unix time."""
        seen = self._runs.get(run)
        return None if seen is None else seen.first_seen

    def marks(self, run: str) -> list[dict[str, Any]]:
        """Return what happened in a run, the oldest first."""
        seen = self._runs.get(run)
        return [] if seen is None else [*seen.marks]

    def rows(self, access: Access, goodput: Mapping[str, float]) -> list[dict[str, Any]]:
        """Return the runs that have ended, the newest first.

        Args:
            goodput: Ratios by run.
        """
        ended = [(name, seen) for name, seen in self._runs.items() if seen.ended_at]
        ended.sort(key=lambda each: -each[1].ended_at)
        return [{**self._row(seen, access), "goodput_ratio": goodput.get(name)} for name, seen in ended]

    def row(self, run: str, access: Access) -> dict[str, Any] | None:
        """Return a run that has ended; None where there is none of that name."""
        seen = self._runs.get(run)
        return self._row(seen, access) if seen is not None and seen.ended_at else None

    def add_mark(self, run: str, **mark: Any) -> None:
        """Add what happened in a run that is here."""
        seen = self._runs.get(run)
        if seen is not None:
            self._add(run, seen, {"rank": None, **mark})

    def _add(self, run: str, seen: _Seen, mark: dict[str, Any]) -> dict[str, Any]:
        seen.marks.append(mark)
        if self.on_mark is not None:
            self.on_mark(run, mark)
        return mark

    def _mark_states(self, run: str, seen: _Seen, ranks: list[Rank], now: float) -> None:
        present = {
            (rank.identity.rank, rank.state) for rank in ranks if rank.connected and rank.state in _KINDS
        }
        for key in present - seen.open.keys():
            mark = {"kind": _KINDS[key[1]], "rank": key[0], "unix_seconds": now, "end_unix_seconds": None}
            seen.open[key] = self._add(run, seen, mark)
        for key in seen.open.keys() - present:
            ended = seen.open.pop(key)
            ended["end_unix_seconds"] = now
            if self.on_mark is not None:
                self.on_mark(run, ended)

    def _mark_verdict(self, run: str, seen: _Seen, now: float) -> None:
        verdict = self._verdict(run)
        cause = "" if verdict is None else verdict.cause.value
        if verdict is not None and cause != seen.cause:
            self._add(
                run,
                seen,
                {"kind": "verdict", "rank": verdict.rank, "unix_seconds": now, "text": cause},
            )
        seen.cause = cause

    def _finish(self, run: str, seen: _Seen, ranks: list[Rank], now: float) -> None:
        row, seen.verdict, seen.users = self._as_ended(run, seen, ranks, now)
        seen.row, seen.ended_at = row, row.ended_unix_seconds
        self._save_at = now

    def _as_ended(
        self, run: str, seen: _Seen, ranks: list[Rank], now: float
    ) -> tuple[RunRow, control_pb2.Verdict | None, list[int | None]]:
        """Return what is to be shown of a run, the verdict on it, and the users of its ranks."""
        verdict = self._verdict(run)
        row = RunRow(
            run=run,
            job_name=ranks[0].identity.job_name,
            world_size=max(rank.identity.world_size for rank in ranks),
            state=ended_state(ranks),
            started_unix_seconds=seen.first_seen,
            ended_unix_seconds=max((rank.last_step_unix_seconds for rank in ranks), default=0.0) or now,
            steps=max(rank.totals.train.steps for rank in ranks),
            step_seconds=max(rank.totals.steady_means()[1] for rank in ranks) or None,
            sparkline=Sparkline(**sparkline(ranks)),
            step_percentiles=history.run_percentiles(history.recent_durations(ranks)),
            outcome=outcome_of(ranks),
        )
        # Nothing of it is here by the time it is shown.
        message = None if verdict is None else run_verdict_to_message(verdict, (), ended=ranks)
        return row, message, [rank.process.uid for rank in ranks]

    def _row(self, seen: _Seen, access: Access) -> dict[str, Any]:
        verdict = None
        if seen.verdict is not None:
            shown = control_pb2.Verdict()
            shown.CopyFrom(seen.verdict)
            access.call().rights.redact_verdict(shown, seen.users)
            verdict = verdict_to_document(shown)
        return {**(asdict(seen.row) if seen.row is not None else {}), "verdict": verdict}

    def _forget(self, now: float) -> None:
        ended = sorted(
            ((seen.ended_at, name) for name, seen in self._runs.items() if seen.ended_at), reverse=True
        )
        for position, (at, name) in enumerate(ended):
            if position >= MAX_FINISHED or now - at > _DAY_S:
                del self._runs[name]
