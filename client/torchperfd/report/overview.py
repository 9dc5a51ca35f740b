"""The overview of a run's end: what a step is spent on, for one rank or across ranks.

Phases have bars, and several ranks a line each. Validation's waits for data are here, too, since verdicts are
about training steps. Pure.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from torchperfd.document.blocks import Bar, Bars, Block, Document, FirstThatFits, Sentences
from torchperfd.document.tables import Table
from torchperfd.document.text import Style, shortened
from torchperfd.model.formatting import duration, milliseconds
from torchperfd.model.host_memory import HostMemory
from torchperfd.model.step_account import Account
from torchperfd.report import numbers
from torchperfd.report.numbers import fit_ns, steady_steps
from torchperfd.report.phase_table import headline, sync_words
from torchperfd.report.rank import RankReport
from torchperfd.steps.phases import DATA, PhaseNames
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


def waits_for_device(table: numbers.Table) -> bool:
    """Return whether the waits for the device are at least :data:`MIN_SHARE` of the step."""
    return bool(table.sync_line) and table.sync_wait_seconds >= MIN_SHARE * (table.step_seconds or 0.0)


def remarks(report: RankReport) -> Iterator[str]:
    """Return what is known of a rank beside its training steps, each in a few words."""
    totals, table = report.totals, report.table
    fit = fit_ns(totals)
    if totals.validate.steps and fit:
        batches = f"{totals.validate.steps} batches of {duration(totals.validate.mean_seconds)}"
        yield f"validation {totals.validate.ns / fit:.0%} of the time ({batches})"
    if totals.checkpoint.calls:
        yield f"checkpoints {totals.checkpoint.calls} ({duration(totals.checkpoint.seconds)})"
    if totals.background_saves.calls:
        yield f"checkpoints in the background {totals.background_saves.calls}"
    if totals.warmup.steps and totals.train.steps > 1:
        yield f"first step {duration(totals.warmup.ns / 1e9)}"
    if totals.host_memory is not None:
        yield f"memory {totals.host_memory.words}".replace(" · ", ", ")
    if table.input_stages:
        yield table.input_stages
    if table.flops_utilization is not None:
        yield f"MFU {table.flops_utilization:.1%}"
    if totals.train.skipped:
        yield f"skipped optimizer steps {totals.train.skipped}"


def _means(kind: KindTotals, names: PhaseNames) -> dict[str, float]:
    if not kind.steps:
        return {}
    return {
        names.name(slot): kind.phases[slot].ns / kind.steps / 1e9
        for slot in range(len(names))
        if kind.phases[slot].ns > 0
    }


ACCOUNT_TITLE: Final = "where a step goes"
_MAX_NAME: Final = 20
_MAX_LABEL: Final = 32
_MEMORY: Final = "RSS / peak"
_NAMED: Final = "▶"
_SHARE: Final = "share of the step"
_HIDDEN: Final = "beside the step, costs nothing"


def overview(
    reports: Sequence[RankReport], percentiles: Percentiles, *, named: Collection[int] = ()
) -> Document:
    """Return the overview, of one section; empty if no rank has made a step.

    Args:
        reports: Each rank's, at least one.
        percentiles: Those of the first rank.
        named: The ranks that the verdict blames.
    """
    rows = rank_rows(reports)
    if not rows:
        return Document([])
    own = next((each for each in reports if each.totals.train.steps), reports[0])
    blocks: list[Block] = [Sentences([headline(own.table, percentiles.get(""))], fold="never")]
    if len(rows) > 1:
        blocks += _ranks(rows, named)
    elif shares := phase_shares(own, percentiles):
        blocks.append(_phases(shares))
    # Of several ranks these are of the one that the verdict blames.
    subject = next((each for each in reports if each.rank in named and each.totals.train.steps), own)
    of_rank = f"rank {subject.rank}: " if len(rows) > 1 else ""
    if beside := " · ".join(remarks(subject)):
        blocks.append(Sentences([f"{of_rank}{beside}"], indent=2, margin=2, fold="always"))
    waits = waits_for_device(subject.table)
    notes = [f"{of_rank}sync_wait: {sync_words(subject.table)}"] if waits else []
    notes += [f"{of_rank}note: {note}" for note in subject.table.notes]
    return Document([[*blocks, Sentences(notes, indent=2, fold="always")]])


def account_bars(account: Account) -> Bars:
    """Return the account of a step. What is hidden stands below the parts of the step."""
    rows = []
    for row in (*account.rows, *account.hidden_rows):
        label = f"  {shortened(row.label, _MAX_LABEL)}"
        share = None if row.is_hidden else row.share
        rows.append(Bar(label, milliseconds(row.seconds), share, _HIDDEN))
    return Bars((ACCOUNT_TITLE, "mean ms", _SHARE), rows)


def _phases(shares: Sequence[PhaseShare]) -> Bars:
    with_percentiles = any(each.p50_seconds is not None for each in shares)
    rows = []
    for each in shares:
        percentiles = (each.p50_seconds, each.p95_seconds) if with_percentiles else ()
        cells = tuple(map(milliseconds, percentiles))
        rows.append(Bar(shortened(each.name, _MAX_NAME), milliseconds(each.seconds), each.share, cells=cells))
    heads = ("phase", "mean ms", _SHARE, *(("p50", "p95") if with_percentiles else ()))
    return Bars(heads, rows, indent=2)


def _ranks(rows: Sequence[RankRow], named: Collection[int]) -> Iterator[Block]:
    shown = shown_ranks(rows, list(named))
    phases = _columns(rows)

    def candidates() -> Iterator[Table]:
        for count in range(len(phases), -1, -1):
            yield _rank_table(shown, phases[:count], named, rows)

    yield FirstThatFits(candidates, fold="always")
    if len(rows) > len(shown):
        others = [row for row in rows if row not in shown]
        own = [row.own_seconds for row in others]
        yield Sentences(
            [f"{len(others)} more ranks, each with {_span(own)} ms of its own work a step"], indent=4
        )
    yield Sentences(["milliseconds per step; wait is for other ranks"], "dim", indent=4)


def _rank_table(
    shown: Sequence[RankRow], phases: Sequence[str], named: Collection[int], rows: Sequence[RankRow]
) -> Table:
    """Return the table of the ranks shown, with these phases; what it has beside them depends on all rows."""
    waits = any(row.phase_seconds.get(WAIT) for row in rows)
    memory = any(row.host_memory for row in rows)
    widest = max(len("rank"), *(len(str(row.rank)) for row in shown))
    cells = []
    for row in shown:
        wait = row.phase_seconds.get(WAIT, 0.0)
        columns = [row.phase_seconds.get(name, 0.0) for name in phases]
        rest = max(0.0, row.step_seconds - wait - sum(columns))
        times = [row.step_seconds, *columns, rest, *([wait] if waits else [])]
        bytes_used = [row.host_memory.cell if row.host_memory else "-"] if memory else []
        rank = f"{_NAMED} {row.rank:>{widest}}" if row.rank in named else str(row.rank)
        cells.append([rank, f"{row.steps}", *map(milliseconds, times), *bytes_used])
    names = [shortened(name, _MAX_NAME) for name in phases]
    last = [*(["wait"] if waits else []), *([_MEMORY] if memory else [])]
    styles: list[Style] = ["bad" if row.rank in named else "" for row in shown]
    heads = ["  rank", "steps", "step", *names, "rest", *last]
    return Table(heads, cells, indent=2, head_style="dim", styles=styles)


def _columns(rows: Sequence[RankRow]) -> list[str]:
    longest: dict[str, float] = {}
    step = max(row.step_seconds for row in rows)
    for row in rows:
        for name, seconds in row.phase_seconds.items():
            longest[name] = max(longest.get(name, 0.0), seconds)
    ordered = sorted(longest, key=lambda name: -longest[name])
    return [name for name in ordered if name not in (WAIT, REST) and longest[name] >= MIN_SHARE * step]


def _span(seconds: Sequence[float]) -> str:
    least, most = milliseconds(min(seconds)), milliseconds(max(seconds))
    return least if least == most else f"{least} to {most}"


_MIN_WAIT_SHARE: Final = 0.2
"""From this share of the step on, a wait for data counts, as in the verdict."""
_MIN_FIT_SHARE: Final = 0.05
"""Validation that takes a smaller share of the whole time does not count."""


def validation_waits(reports: Sequence[RankReport]) -> Iterator[str]:
    """Return in words how long the validation of the rank that waits longest waits for data."""
    # Beside a device the host may wait while the device still works, which costs nothing.
    reports = [each for each in reports if each.totals.cuda is None]
    longest = max(reports, key=lambda each: each.totals.validate.phases[DATA].ns, default=None)
    if longest is None:
        return
    validate, fit = longest.totals.validate, fit_ns(longest.totals)
    waits = validate.phases[DATA].ns
    if not fit or validate.ns < _MIN_FIT_SHARE * fit or waits < _MIN_WAIT_SHARE * validate.ns:
        return
    each_waits = duration(waits / validate.steps / 1e9)
    yield (
        f"validation waits for data: {each_waits} of each {duration(validate.mean_seconds)} step"
        f" ({waits / validate.ns:.0%}); validation is {validate.ns / fit:.0%} of the time"
    )
