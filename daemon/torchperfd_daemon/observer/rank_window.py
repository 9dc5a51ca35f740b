"""What follows from the newest samples of one rank: facts of a window, and of the rank's totals."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from operator import attrgetter
from pathlib import PurePath
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from torchperfd.model.source_lines import SyncWait, TimedLine
from torchperfd.model.totals import GcTotals, PhaseTotals
from torchperfd_daemon.diagnosis.detect.straggler import RankWork
from torchperfd_daemon.diagnosis.evidence import RankEvidence
from torchperfd_daemon.store.model import Totals, rank_in
from torchperfd_daemon.store.store import Rank

Float64 = npt.NDArray[np.float64]


def error_of_means(rows: Float64, totals: int, counts: int) -> float:
    """Return the standard error of a mean, from the means between successive rows of two running sums.

    Args:
        rows: Oldest first; shape (rows, width).
        totals: Column of the sums.
        counts: Column of how many were summed.
    """
    # Plain sums: there are few rows, and numpy's calls cost more than these.
    pairs = pairwise(zip(rows[:, totals].tolist(), rows[:, counts].tolist(), strict=True))
    means = [(total - past) / (count - before) for (past, before), (total, count) in pairs if count > before]
    if len(means) < 2:
        return 0.0
    middle = sum(means) / len(means)
    return math.sqrt(sum((mean - middle) ** 2 for mean in means) / (len(means) - 1) / len(means))


class NewestRows:
    """Rows of equal width, of which the newest are kept. Index 0 is the newest, 1 the one before it.

    Args:
        most: How many are kept.
        width: Numbers of a row.
    """

    def __init__(self, most: int, width: int) -> None:
        self._rows: Float64 = np.zeros((most, width))
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, back: int) -> Float64:
        row: Float64 = self._rows[self._count - 1 - back]
        return row

    def add(self) -> Float64:
        """Return a new row of zeros, to be filled in place."""
        if self._count < len(self._rows):
            self._count += 1
        else:
            self._rows[:-1] = self._rows[1:]
        row = self[0]
        row[:] = 0.0
        return row

    def newest(self, count: int) -> Float64:
        """Return at most so many rows, the oldest first; shape (rows, width)."""
        rows: Float64 = self._rows[max(0, self._count - count) : self._count]
        return rows

    def since(self, least: float, column: int, most: int) -> int:
        """Return how many rows, at most ``most``, follow the first whose column is at least ``least``."""
        most = min(most, self._count - 1)
        while most > 0 and self[most][column] < least:
            most -= 1
        return most


_MIN_PAST: Final = 0.5
_ALIKE: Final = 1.02
_WAIT: Final = "collective_wait"
_DATA: Final = "data"
_MIN_STARTS: Final = 2
# So many steps timed on the device show by how much they differ.
_MIN_TIMED: Final = 10


@dataclass(frozen=True, slots=True)
class WindowEdge:
    """The totals at the beginning of a window, as far as evidence follows from their growth."""

    steps: int
    gc: tuple[GcTotals, ...]
    sync_waits: tuple[SyncWait, ...]
    collect_calls: tuple[TimedLine, ...]
    script_collectives: tuple[TimedLine, ...]
    device_work: PhaseTotals

    @classmethod
    def of(cls, totals: Totals) -> "WindowEdge":
        """Return what is kept of a rank's totals."""
        return cls(totals.train.steps, *_kept_of(totals))


_kept_of = attrgetter(*(each.name for each in fields(WindowEdge)[1:]))


def with_window_facts(evidence: RankEvidence, before: WindowEdge, now: Totals) -> RankEvidence:
    """Return a rank's evidence with :func:`window_facts`."""
    facts = window_facts(before, now, evidence.phase_seconds, evidence.collected_seconds)
    return replace(evidence, **facts)


def window_facts(
    before: WindowEdge, now: Totals, phase_seconds: Mapping[str, float], collected_seconds: float
) -> dict[str, Any]:
    """Return the fields of a rank's evidence that its totals show besides phases; none without a step.

    Args:
        before: The window's beginning.
        now: The totals at its end.
        phase_seconds: As in the evidence, like ``collected_seconds``.
    """
    steps = now.train.steps - before.steps
    if steps <= 0:
        return {}
    called, collect_line = _since(before.collect_calls, now.collect_calls)
    own, own_line = _since(before.script_collectives, now.script_collectives)
    waited = phase_seconds.get(_WAIT, 0.0)
    starts = _epoch_start_seconds(now)
    return {
        "sync_line": _longest_wait(before.sync_waits, now.sync_waits),
        "switches": now.switches,
        "graph_limit_reached": bool(now.graph_limit),
        "graph_limit_function": now.graph_limit,
        "called_collection_seconds": min(called.ns / steps / 1e9, collected_seconds),
        "collect_line": f"{PurePath(collect_line.file).name}:{collect_line.line}" if collect_line else "",
        "script_collectives": own.calls / steps,
        "script_collective_seconds": min(own.ns / steps / 1e9, waited),
        "script_collective_line": own_line.words if own_line else "",
        "epoch_start_seconds": min(starts, phase_seconds.get(_DATA, 0.0)),
        "workers_respawn": now.loader is not None and now.loader.respawns_workers,
        "own_deviation_seconds": _deviation(before.device_work, now.device_work),
    }


def _epoch_start_seconds(now: Totals) -> float:
    """Return the waits for first batches, spread over the steps of the whole run.

    A window has few of them, and by chance one more or less.
    """
    starts = now.epoch_starts
    return starts.ns / now.train.steps / 1e9 if starts.calls >= _MIN_STARTS else 0.0


def _since(before: Sequence[TimedLine], now: Sequence[TimedLine]) -> tuple[PhaseTotals, TimedLine | None]:
    """Return the calls of all lines since then, and the line with most time since then."""
    if not now:
        return PhaseTotals(), None
    past = {line.place: line for line in before}
    added = [
        replace(line, calls=line.calls - old.calls, ns=line.ns - old.ns)
        if (old := past.get(line.place)) and line.ns >= old.ns and line.calls >= old.calls
        else line
        for line in now
    ]
    longest = max((line for line in added if line.ns), key=lambda line: line.ns, default=None)
    return PhaseTotals(sum(line.calls for line in added), sum(line.ns for line in added)), longest


def _minus(total: PhaseTotals, part: PhaseTotals) -> PhaseTotals:
    squares = max(0.0, total.squares - part.squares)
    return PhaseTotals(max(0, total.calls - part.calls), max(0, total.ns - part.ns), squares)


def _deviation(before: PhaseTotals, now: PhaseTotals) -> float | None:
    """Return the standard deviation of single steps in seconds; None for too few of them.

    In steps of many phases few are timed whole: a window with too few has the deviation of the whole run.
    """
    if now.calls < _MIN_TIMED:
        return None
    work = _minus(now, before)
    if work.calls < _MIN_TIMED:
        work = now
    mean = work.ns / work.calls
    return math.sqrt(max(0.0, work.squares / work.calls - mean * mean)) / 1e9


def _longest_wait(before: Sequence[SyncWait], now: Sequence[SyncWait]) -> str:
    """Return the line in which the host has waited longest for its device since then; empty for none."""
    if not now:
        return ""
    past = {wait.place: wait.ns for wait in before}
    return max(now, key=lambda wait: wait.ns - past.get(wait.place, 0)).words


def host_work(rank: Rank, count: int, usual: Mapping[str, float] | None = None) -> RankWork:
    """Return the newest steps of a rank on its host, as far as the store still has them.

    Args:
        count: How many.
        usual: Seconds by which each phase was always longer than the other ranks'; subtracted.
    """
    usually = usual or {}
    return RankWork(
        rank.identity.rank,
        {
            name: np.asarray(column, dtype=np.int64) / 1e9 - usually.get(name, 0.0)
            for name, column in rank.history.newest(count).phases.items()
        },
        stage_of(rank.totals),
    )


def device_seconds(names: Sequence[str], device_ns: Float64, step_seconds: float) -> dict[str, float]:
    """Return each phase's time on the device per step; empty if none was timed.

    Steps on the device take as long as on the host. Its times arrive a report later than the steps, so
    only their shares are taken.

    Args:
        device_ns: What was timed of each of the phases, in their order, and maybe of more.
    """
    spent = device_ns[: len(names)]
    whole = float(spent.sum())
    if whole <= 0:
        return {}
    return {name: step_seconds * float(ns) / whole for name, ns in zip(names, spent, strict=True) if ns}


def is_on_device(totals: Totals) -> bool:
    """Return whether a rank's phases are timed on a device as well as on the host."""
    return any(phase.device_calls for phase in totals.train.phases.values())


def stage_of(totals: Totals) -> int | None:
    """Return a rank's pipeline stage; None without pipeline parallelism."""
    return rank_in("pipeline", totals.coordinates)


def count_saves(totals: Totals) -> int:
    """Return the number of checkpoints within steps and between them."""
    within = totals.train.phases.get("checkpoint")
    return (within.calls if within else 0) + (totals.checkpoint.calls if totals.checkpoint else 0)


def healthy_until(first: Float64, rows: Sequence[Float64], steps: int, ns: int) -> Float64:
    """Return the newest sample up to which the mean step is close to its minimum; ``rows`` descend in time.

    A slowdown of every tenth step is detected late. Its first slow steps must not become part of the past.

    Args:
        first: The sample before all of them.
        steps: The column with the number of steps.
        ns: The column with their time.
    """
    made = rows[0][steps] - first[steps]
    means = [
        (row[ns] - first[ns]) / (row[steps] - first[steps])
        if row[steps] - first[steps] > made * _MIN_PAST
        else np.inf
        for row in rows
    ]
    least = min(means)
    return next(row for row, mean in zip(rows, means, strict=True) if mean <= least * _ALIKE)
