"""The overview of a run's end: what a step is spent on, for one rank or across ranks.

It is drawn within 80 columns: phases with bars, or one line per rank. Validation's waits for data are here,
too, since verdicts are about training steps. Pure.
"""

import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from torchperfd.model.formatting import duration, milliseconds
from torchperfd.model.host_memory import HostMemory
from torchperfd.model.step_account import Account
from torchperfd.model.terminal_text import paint
from torchperfd.report.numbers import Table, fit_ns, steady_steps
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


ACCOUNT_TITLE: Final = "where a step goes"
_MAX_NAME: Final = 20
_MAX_LABEL: Final = 32
_BLOCKS: Final = " ▏▎▍▌▋▊▉"
_MIN_BAR: Final = 10
_MEMORY: Final = "RSS / peak"
_FIXED_COLUMNS: Final = 4 + len("1024  1000000  12345  12345  12345")
"""Width of a rank, its steps, its step, the rest and the wait, at their longest."""


def render_overview(
    reports: Sequence[RankReport],
    percentiles: Percentiles,
    *,
    named: Collection[int] = (),
    colour: bool = False,
    width: int = 80,
) -> str:
    """Return the overview, without a last newline; empty if no rank has made a step.

    Args:
        reports: Each rank's, at least one.
        percentiles: Those of the first rank.
        named: The ranks that the verdict blames.
    """
    rows = rank_rows(reports)
    if not rows:
        return ""
    own = next((each for each in reports if each.totals.train.steps), reports[0])
    lines = [headline(own.table, percentiles.get(""))]
    if len(rows) > 1:
        lines += _ranks(rows, named, colour=colour, width=width)
    else:
        lines += _phases(own, percentiles, colour=colour, width=width)
    beside = " · ".join(remarks(own))
    lines += textwrap.wrap(beside, width, initial_indent="  ", subsequent_indent="  ")
    if waits_for_device(own.table):
        lines.append(f"  sync_wait: {sync_words(own.table)}")
    lines += [f"  note: {note}" for note in own.table.notes]
    return "\n".join(lines)


def account_table(account: Account, *, colour: bool = False, width: int = 80) -> str:
    """Return the account of a step as a table with bars, without a last newline.

    What is hidden stands below the parts of the step.
    """
    rows = (*account.rows, *account.hidden_rows)
    labels = [_cut(row.label, _MAX_LABEL) for row in rows]
    first = max(len(ACCOUNT_TITLE) - 2, *map(len, labels), 0)
    bar = max(_MIN_BAR, min(40, width - 2 - first - 9 - 2 - 6))
    lines = [paint(f"{ACCOUNT_TITLE:<{first + 2}}{'mean ms':>9}  share of the step", "dim", colour=colour)]
    for label, row in zip(labels, rows, strict=True):
        line = f"  {label:<{first}}{milliseconds(row.seconds):>9}  "
        if row.is_hidden:
            lines.append(paint(f"{line}beside the step, costs nothing", "dim", colour=colour))
        else:
            lines.append(f"{line}{paint(_bar(row.share, bar), 'bar', colour=colour)}{_percent(row.share):>5}")
    return "\n".join(lines)


def _phases(report: RankReport, percentiles: Percentiles, *, colour: bool, width: int) -> Iterator[str]:
    shares = phase_shares(report, percentiles)
    if not shares:
        return
    names = [_cut(each.name) for each in shares]
    first = max(len("phase"), *map(len, names))
    with_percentiles = any(each.p50_seconds is not None for each in shares)
    numbers = 9 + 9 if with_percentiles else 0
    bar = max(_MIN_BAR, min(40, width - 2 - first - 9 - 2 - 6 - numbers))
    head = f"  {'phase':<{first}}{'mean ms':>9}  {'share of the step':<{bar}}      "
    yield paint((head + (f"{'p50':>9}{'p95':>9}" if with_percentiles else "")).rstrip(), "dim", colour=colour)
    for name, each in zip(names, shares, strict=True):
        drawn = paint(_bar(each.share, bar), "bar", colour=colour)
        line = f"  {name:<{first}}{milliseconds(each.seconds):>9}  {drawn}{_percent(each.share):>5} "
        if with_percentiles:
            line += f"{milliseconds(each.p50_seconds):>9}{milliseconds(each.p95_seconds):>9}"
        yield line.rstrip()


def _ranks(rows: Sequence[RankRow], named: Collection[int], *, colour: bool, width: int) -> Iterator[str]:
    shown = shown_ranks(rows, list(named))
    phases = _columns(rows, width)
    waits = any(row.phase_seconds.get(WAIT) for row in rows)
    memory = any(row.host_memory for row in rows)
    last = [*(["wait"] if waits else []), *([_MEMORY] if memory else [])]
    heads = ["rank", "steps", "step", *map(_cut, phases), "rest", *last]
    table = [heads]
    for row in shown:
        wait = row.phase_seconds.get(WAIT, 0.0)
        columns = [row.phase_seconds.get(name, 0.0) for name in phases]
        rest = max(0.0, row.step_seconds - wait - sum(columns))
        times = [row.step_seconds, *columns, rest, *([wait] if waits else [])]
        bytes_used = [row.host_memory.cell if row.host_memory else "-"] if memory else []
        table.append([str(row.rank), f"{row.steps}", *map(milliseconds, times), *bytes_used])
    widths = [max(len(line[column]) for line in table) for column in range(len(heads))]
    lines = ["  ".join(cell.rjust(size) for cell, size in zip(line, widths, strict=True)) for line in table]
    yield paint(f"    {lines[0]}", "dim", colour=colour)
    for row, line in zip(shown, lines[1:], strict=True):
        is_named = row.rank in named
        yield paint(f"  {'▶' if is_named else ' '} {line}", "bad", colour=colour and is_named)
    if len(rows) > len(shown):
        others = [row for row in rows if row not in shown]
        own = [row.own_seconds for row in others]
        yield f"    {len(others)} more ranks, each with {_span(own)} ms of its own work a step"
    yield paint("    milliseconds per step; wait is for other ranks", "dim", colour=colour)


def _columns(rows: Sequence[RankRow], width: int) -> list[str]:
    """Return the phases that get a column, in the order of their length: as many as fit."""
    longest: dict[str, float] = {}
    step = max(row.step_seconds for row in rows)
    for row in rows:
        for name, seconds in row.phase_seconds.items():
            longest[name] = max(longest.get(name, 0.0), seconds)
    memory = [len(row.host_memory.cell) for row in rows if row.host_memory]
    room = width - _FIXED_COLUMNS - (max(len(_MEMORY), *memory) + 2 if memory else 0)
    chosen: list[str] = []
    for name in sorted(longest, key=lambda name: -longest[name]):
        if name in (WAIT, REST) or longest[name] < MIN_SHARE * step:
            continue
        room -= max(5, len(_cut(name))) + 2
        if room < 0:
            break
        chosen.append(name)
    return chosen


def _span(seconds: Sequence[float]) -> str:
    least, most = milliseconds(min(seconds)), milliseconds(max(seconds))
    return least if least == most else f"{least} to {most}"


def _bar(share: float, width: int) -> str:
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    full, part = divmod(eighths, 8)
    return ("█" * full + (_BLOCKS[part] if part else "")).ljust(width)


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.005 else "<1%"


def _cut(name: str, most: int = _MAX_NAME) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"


_MIN_WAIT_SHARE: Final = 0.2
"""From this share of the step on, a wait for data counts, as in the verdict."""
_LEAST_OF_FIT: Final = 0.05
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
    if not fit or validate.ns < _LEAST_OF_FIT * fit or waits < _MIN_WAIT_SHARE * validate.ns:
        return
    each_waits = duration(waits / validate.steps / 1e9)
    yield (
        f"validation waits for data: {each_waits} of each {duration(validate.mean_seconds)} step"
        f" ({waits / validate.ns:.0%}); validation is {validate.ns / fit:.0%} of the time"
    )
