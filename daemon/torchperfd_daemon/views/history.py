"""The newest seconds and steps of a run's ranks, and their percentiles, for the live page."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from torchperfd_daemon.store.history import HISTORY_SECONDS, SecondColumns
from torchperfd_daemon.store.store import Rank, p50_and_p95

WAIT: Final = "collective_wait"
MAX_OUTLIERS: Final = 16

_DIGITS: Final = 7
_FEW: Final = 16
_REPORTED_S: Final = 6
_ABOVE: Final = 1.05
_PERCENTILES: Final = (("p5", 0.05), ("p50", 0.5), ("p95", 0.95))

_Floats = npt.NDArray[np.float64]


def rounded(values: _Floats, digits: int = _DIGITS) -> list[float]:
    """Return seconds to a tenth of a microsecond: more digits would only lengthen an answer."""
    numbers: list[float] = values.tolist()
    if len(numbers) <= _FEW:
        # Such as those of an event: numpy's call costs more than these.
        return [round(number, digits) for number in numbers]
    return np.round(values, digits).tolist()  # type: ignore[no-any-return]


def whole_seconds(rank: Rank, after: int, now: float, newest: int = HISTORY_SECONDS) -> SecondColumns:
    """Return the seconds after one whose steps have all been reported.

    Args:
        after: A whole second of Unix time; -1 for all that are kept.
        now: Unix seconds.
        newest: At most the last so many.
    """
    return rank.seconds.since(after, newest, newest_whole(rank, now))


def newest_whole(rank: Rank, now: float) -> int:
    """Return the newest second whose steps have all been reported, at Unix time ``now``."""
    newest = rank.seconds.newest
    # A rank reports at least every four seconds, and its steps in order.
    return newest - 1 if now < newest + _REPORTED_S else newest


def seconds_dict(found: SecondColumns, *, phases: bool) -> dict[str, Any]:
    wait = found.phase_seconds.get(WAIT)
    return {
        "unix_seconds": found.unix_seconds.tolist(),
        "steps": found.steps.tolist(),
        "step_seconds": rounded(found.step_seconds),
        "longest_seconds": rounded(found.longest_seconds),
        **_own_and_wait(found.step_seconds, wait),
        **({"phase_seconds": _phases(found.phase_seconds)} if phases else {}),
    }


def steps_dict(rank: Rank, newest: int, since: float, *, phases: bool) -> dict[str, Any]:
    """Return a rank's newest single steps as columns, the oldest first.

    Args:
        newest: At most so many.
        since: Only those that ended later, in Unix time.
    """
    held = rank.history.newest(newest)
    ends = np.asarray(held.end_unix_ns, dtype=np.float64) / 1e9
    left_out = int(np.searchsorted(ends, since, side="right"))
    durations = np.asarray(held.duration_ns, dtype=np.float64)[left_out:] / 1e9
    columns = {
        name: np.asarray(column, dtype=np.float64)[left_out:] / 1e9 for name, column in held.phases.items()
    }
    return {
        "first_step": max(0, rank.next_step - len(durations)),
        "end_unix_seconds": rounded(ends[left_out:], 6),
        "step_seconds": rounded(durations),
        **_own_and_wait(durations, columns.get(WAIT)),
        **({"phase_seconds": _phases(columns)} if phases else {}),
    }


def own_seconds(rank: Rank, newest: int = HISTORY_SECONDS) -> SecondColumns:
    """Return what :func:`across_dict` compares of a rank."""
    return rank.seconds.since(newest=newest, phases=(WAIT,))


def across_dict(
    ranks: Sequence[int], histories: Sequence[SecondColumns], newest: int = HISTORY_SECONDS
) -> dict[str, Any]:
    """Return percentiles over ranks of each second, and the ranks with most work of their own.

    May run on any thread.

    Args:
        ranks: Their numbers.
        histories: Their :func:`own_seconds`.
    """
    there = [found.unix_seconds for found in histories if len(found.unix_seconds)]
    if not there:
        return {"unix_seconds": [], "ranks": [], "step": _empty(), "own": _empty(), "outliers": []}
    last = max(int(seconds[-1]) for seconds in there)
    first = max(min(int(seconds[0]) for seconds in there), last - newest + 1)
    shape = (len(histories), last - first + 1)
    step, own = np.full(shape, np.nan), np.full(shape, np.nan)
    for row, found in enumerate(histories):
        wanted = found.unix_seconds >= first
        columns = found.unix_seconds[wanted] - first
        step[row, columns] = found.step_seconds[wanted]
        wait = found.phase_seconds.get(WAIT)
        own[row, columns] = (found.step_seconds - (0.0 if wait is None else wait))[wanted]
    counts = (~np.isnan(step)).sum(axis=0)
    seen = np.flatnonzero(counts)
    numbers = np.array(ranks)
    step, own, counts = step[:, seen], own[:, seen], counts[seen]
    return {
        "unix_seconds": (seen + first).tolist(),
        "ranks": counts.tolist(),
        "step": _spread(step, counts, numbers),
        "own": _spread(own, counts, numbers),
        "outliers": _outliers(own, counts, numbers),
    }


def sparkline(ranks: Sequence[Rank], interval: int = 10) -> dict[str, Any]:
    """Return the run's mean step over the last ten minutes, one value per interval.

    Args:
        interval: Seconds; a divisor of ten minutes.
    """
    count = HISTORY_SECONDS // interval
    newest = max((rank.seconds.newest for rank in ranks), default=-1)
    until = (newest // interval + 1) * interval
    first = until - HISTORY_SECONDS
    total, steps = np.zeros(count), np.zeros(count)
    for rank in ranks:
        found = rank.seconds.since(first - 1, phases=())
        places = (found.unix_seconds - first) // interval
        total += np.bincount(places, found.step_seconds * found.steps, count)
        steps += np.bincount(places, found.steps, count)
    values = [
        round(spent / made, _DIGITS) if made else None
        for spent, made in zip(total.tolist(), steps.tolist(), strict=True)
    ]
    return {
        "until_unix_seconds": until if newest >= 0 else None,
        "interval_seconds": interval,
        "step_seconds": values,
    }


def phase_names(means: Iterable[Mapping[str, float]]) -> list[str]:
    """Return the phases that any rank has steps with, the ones that took most time first.

    Args:
        means: Of each rank, the mean time of its phases.
    """
    spent: dict[str, float] = {}
    for phases in means:
        for name, seconds in phases.items():
            spent[name] = spent.get(name, 0.0) + seconds
    return sorted(spent, key=lambda name: -spent[name])


def _own_and_wait(step: _Floats, wait: _Floats | None) -> dict[str, Any]:
    if wait is None:
        return {"own_seconds": rounded(step), "wait_seconds": None}
    return {"own_seconds": rounded(np.maximum(step - wait, 0.0)), "wait_seconds": rounded(wait)}


def _phases(columns: Mapping[str, _Floats]) -> dict[str, list[float]]:
    return {name: rounded(column) for name, column in columns.items()}


def _empty() -> dict[str, list[float]]:
    return {name: [] for name in ("p5", "p50", "p95", "max", "max_rank")}


def _ranked(ordered: _Floats, counts: npt.NDArray[Any], share: float) -> _Floats:
    """Return a percentile of each column, out of columns that are sorted with what is missing last."""
    rows = np.minimum((share * counts).astype(np.int64), counts - 1)
    chosen: _Floats = ordered[rows, np.arange(ordered.shape[1])]
    return chosen


def _spread(values: _Floats, counts: npt.NDArray[Any], numbers: npt.NDArray[Any]) -> dict[str, Any]:
    ordered = np.sort(values, axis=0)
    return {
        **{name: rounded(_ranked(ordered, counts, share)) for name, share in _PERCENTILES},
        "max": rounded(_ranked(ordered, counts, 1.0)),
        "max_rank": numbers[np.nanargmax(values, axis=0)].tolist(),
    }


def _outliers(own: _Floats, counts: npt.NDArray[Any], numbers: npt.NDArray[Any]) -> list[dict[str, Any]]:
    if len(numbers) < 2:
        return []
    middle = _ranked(np.sort(own, axis=0), counts, 0.5)
    there = ~np.isnan(own)
    excess = np.where(there, own - middle, 0.0).sum(axis=1) / np.maximum(there.sum(axis=1), 1)
    above = (np.where(there, own, 0.0) > _ABOVE * middle).sum(axis=1)
    order = [row for row in np.argsort(-excess, kind="stable")[:MAX_OUTLIERS] if above[row]]
    return [
        {
            "rank": int(numbers[row]),
            "excess_seconds": round(float(excess[row]), _DIGITS),
            "seconds_above": int(above[row]),
        }
        for row in order
    ]


_SECONDS_DIGITS: Final = 7

Durations = Mapping[int, Sequence[int]]
"""The durations of steps by rank, in nanoseconds."""


@dataclass(slots=True)
class RankPercentiles:
    """Those of one rank, in seconds."""

    rank: int
    p50_seconds: float
    p95_seconds: float


@dataclass(slots=True)
class StepPercentiles:
    """Those of the steps of all ranks together, in seconds.

    Attributes:
        slowest: Those of the rank with the largest mean step.
    """

    p50_seconds: float
    p95_seconds: float
    slowest: RankPercentiles


def recent_durations(ranks: Iterable[Rank]) -> Durations:
    """Return copies of the durations of each rank's present steps.

    Ranks without steps are left out, and those that have left unless all have.
    """
    stepped = [rank for rank in ranks if rank.steady_steps]
    there = [rank for rank in stepped if rank.connected] or stepped
    return {rank.identity.rank: rank.history.newest_durations(rank.present_steps) for rank in there}


def run_percentiles(durations: Durations) -> StepPercentiles | None:
    """Return the percentiles of a run; None without steps. May run on any thread."""
    if not durations:
        return None
    p50, p95 = p50_and_p95(np.concatenate([np.asarray(column) for column in durations.values()]))
    slowest = max(durations, key=lambda rank: float(np.mean(durations[rank])))
    return StepPercentiles(_seconds(p50), _seconds(p95), rank_percentiles({slowest: durations[slowest]})[0])


def rank_percentiles(durations: Durations) -> list[RankPercentiles]:
    """Return the percentiles of each rank. May run on any thread."""
    by_count: dict[int, list[int]] = {}
    for rank, column in durations.items():
        by_count.setdefault(len(column), []).append(rank)
    # Nearly always all ranks have as many steps, so that all are sorted in one call.
    return [
        RankPercentiles(rank, _seconds(p50), _seconds(p95))
        for ranks in by_count.values()
        for rank, p50, p95 in zip(ranks, *p50_and_p95([durations[rank] for rank in ranks]), strict=True)
    ]


def _seconds(nanoseconds: Any) -> float:
    return round(float(nanoseconds) / 1e9, _SECONDS_DIGITS)
