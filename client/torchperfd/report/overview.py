"""The overview of a run's end: what a step is spent on, for one rank or across ranks. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from torchperfd.durations import duration
from torchperfd.host_memory import HostMemory
from torchperfd.report.numbers import Table, fit_ns, steady_steps
from torchperfd.report.rank import RankReport
from torchperfd.steps.phases import PhaseNames
from torchperfd.steps.totals import KindTotals

MIN_SHARE: Final = 0.01
"""Phases with a smaller share of the step are summed up as one."""
REST: Final = "rest"
WAIT: Final = "collective_wait"
MAX_RANKS: Final = 16
"""More ranks than these are not all shown."""

Percentiles = Mapping[str, tuple[float, float]]
"""Median and 95th percentile per step by phase, in seconds; that of the whole step by an empty name."""


@dataclass(frozen=True, slots=True)
class PhaseShare:
    """A phase's part of the mean training step after the first.

    Attributes:
        seconds: Its mean time per step.
        share: Its part of the step, 0 to 1.
        p50_seconds: Median of the newest steps; None if unknown.
        p95_seconds: 95th percentile of the newest steps; None if unknown.
    """

    name: str
    seconds: float
    share: float
    p50_seconds: float | None = None
    p95_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class RankRow:
    """One rank of several.

    Attributes:
        phase_seconds: Mean time per step by phase.
        host_memory: Of its process; None if unknown.
        own_seconds: The step less the wait for other ranks.
    """

    rank: int
    steps: int
    step_seconds: float
    phase_seconds: Mapping[str, float]
    host_memory: HostMemory | None = None

    @property
    def own_seconds(self) -> float:
        """The step less the wait for other ranks."""
        return self.step_seconds - self.phase_seconds.get(WAIT, 0.0)


def phase_shares(report: RankReport, percentiles: Percentiles) -> list[PhaseShare]:
    """Return a rank's phases, longest first, with those below :data:`MIN_SHARE` summed up at the end."""
    means = _means(steady_steps(report.totals), report.names)
    step = sum(means.values())
    if not step:
        return []
    shown, rest = [], 0.0
    for name, seconds in sorted(means.items(), key=lambda item: -item[1]):
        if seconds < MIN_SHARE * step:
            rest += seconds
        else:
            p50, p95 = percentiles.get(name, (None, None))
            shown.append(PhaseShare(name, seconds, seconds / step, p50, p95))
    return [*shown, PhaseShare(REST, rest, rest / step)] if rest else shown


def rank_rows(reports: Sequence[RankReport]) -> list[RankRow]:
    """Return a row for each rank that has made a training step."""
    return [
        RankRow(
            each.rank,
            each.totals.train.steps,
            steady.mean_seconds if steady.steps else 0.0,
            _means(steady, each.names),
            each.totals.host_memory,
        )
        for each in reports
        if (steady := steady_steps(each.totals)).steps
    ]


def shown_ranks(rows: Sequence[RankRow], named: Sequence[int]) -> list[RankRow]:
    """Return the rows to show, by rank: all of few; else those named, and those with most work."""
    if len(rows) <= MAX_RANKS:
        return sorted(rows, key=lambda row: row.rank)
    by_work = sorted(rows, key=lambda row: (row.rank not in named, -row.own_seconds))
    return sorted(by_work[:MAX_RANKS], key=lambda row: row.rank)


def waits_for_device(table: Table) -> bool:
    """Return whether the waits for the device are at least :data:`MIN_SHARE` of the step."""
    return bool(table.sync_line) and table.sync_wait_seconds >= MIN_SHARE * (table.step_seconds or 0.0)


def remarks(report: RankReport) -> Iterator[str]:
    """Return what is known of a rank beside its training steps, each in a few words."""
    totals, table = report.totals, report.table
    fit = fit_ns(totals)
    if totals.validate.steps and fit:
        batches = f"{totals.validate.steps} batches of {duration(totals.validate.mean_seconds)}"
        yield f"validation {totals.validate.ns / fit:.0%} of the time ({batches})"
    if table.saves:
        yield f"checkpoints {table.saves} ({duration(table.save_seconds)})"
    if table.background_saves:
        yield f"checkpoints in the background {table.background_saves}"
    if totals.warmup.steps and totals.train.steps > 1:
        yield f"first step {duration(totals.warmup.ns / 1e9)}"
    if table.host_memory is not None:
        yield f"memory {table.host_memory.words}".replace(" · ", ", ")
    if table.input_stages:
        yield table.input_stages
    if table.flops_utilization is not None:
        yield f"MFU {table.flops_utilization:.1%}"
    if table.skipped:
        yield f"skipped optimizer steps {table.skipped}"


def _means(kind: KindTotals, names: PhaseNames) -> dict[str, float]:
    if not kind.steps:
        return {}
    return {
        names.name(slot): kind.phases[slot].ns / kind.steps / 1e9
        for slot in range(len(names))
        if kind.phases[slot].ns > 0
    }
