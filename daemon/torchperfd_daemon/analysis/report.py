"""The two faces of a `Summary`: a table for people, a versioned dictionary for programs."""

import statistics
from typing import IO, Any, Final, Literal

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from torchperfd_daemon.analysis.operators import Operator
from torchperfd_daemon.analysis.steps import Step
from torchperfd_daemon.analysis.summary import Summary

SCHEMA: Final = "torchperfd.analysis/1"
SortBy = Literal["self", "total", "calls"]
# Off a terminal there is no width to ask for, and a log or a pipe must not reflow with the caller's.
_PLAIN_WIDTH: Final = 110
_GUTTER: Final = 3
_NAME_AT_LEAST: Final = 12


def to_dict(summary: Summary, rank: int | None, sort_by: SortBy = "self") -> dict[str, Any]:
    """Return one entry of ``ranks`` in the ``torchperfd.analysis/1`` document; times in µs."""
    return {
        "rank": rank,
        "trace": {
            "path": summary.path,
            "bytes": summary.size,
            "events": summary.events,
            "skipped": summary.skipped,
            "damaged": summary.damaged,
            "duration_us": summary.duration_ns / 1000,
        },
        "steps": [
            {"index": step.index, "start_us": step.start_ns / 1000, "duration_us": step.duration_ns / 1000}
            for step in summary.steps
        ],
        "operators": [
            {
                "name": row.name,
                "category": row.category,
                "calls": row.calls,
                "self_cpu_us": row.self_cpu_ns / 1000,
                "total_cpu_us": row.total_cpu_ns / 1000,
                "self_cpu_share": summary.share(row),
                "self_device_us": row.self_device_ns / 1000,
                "total_device_us": row.total_device_ns / 1000,
            }
            for row in _sorted(summary, sort_by)
        ],
    }


def render_text(
    summary: Summary, rank: int | None, out: IO[str], *, limit: int = 15, sort_by: SortBy = "self"
) -> None:
    """Write the summary's facts and the first ``limit`` rows of its table to ``out``.

    On a terminal it fits the terminal's width; elsewhere it is plain text of a fixed one.
    """
    console = Console(
        file=out, width=None if out.isatty() else _PLAIN_WIDTH, markup=False, highlight=False, emoji=False
    )
    title = "" if rank is None else f"rank {rank}: "
    console.print(Text(f"{title}{_printable(summary.path)}", style="bold"), soft_wrap=True)
    console.print(
        f"{summary.size:,} bytes, {summary.events:,} events, {summary.skipped:,} skipped, "
        f"{_ms(summary.duration_ns)} ms recorded"
    )
    console.print(_steps_line(summary.steps))
    console.print()
    console.print(_table(summary, limit, sort_by, console.width))
    hidden = len(summary.operators) - limit
    if hidden > 0:
        console.print(f"{hidden:,} more operators; --limit {len(summary.operators)} shows all")


def _table(summary: Summary, limit: int, sort_by: SortBy, width: int) -> Table:
    headings = ["operator", "calls", "self CPU ms", "self %", "total CPU ms"]
    with_device = any(row.total_device_ns for row in summary.operators)
    if with_device:
        headings += ["self GPU ms", "total GPU ms"]
    lines = [_cells(summary, row, with_device) for row in _sorted(summary, sort_by)[:limit]]
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    # Names give way to numbers: a cut name can still be recognised, a cut number misleads.
    widths = [max(len(cell) for cell in column) for column in zip(headings, *lines, strict=True)]
    for_names = width - sum(widths[1:]) - _GUTTER * (len(headings) - 1)
    table.add_column(headings[0], no_wrap=True, max_width=max(_NAME_AT_LEAST, for_names))
    for heading, least in zip(headings[1:], widths[1:], strict=True):
        table.add_column(heading, justify="right", no_wrap=True, min_width=least)
    for name, *numbers in lines:
        table.add_row(Text(name), *numbers)
    return table


def _cells(summary: Summary, row: Operator, with_device: bool) -> list[str]:
    cells = [
        _printable(row.name),
        f"{row.calls:,}",
        _ms(row.self_cpu_ns),
        f"{summary.share(row):.1%}",
        _ms(row.total_cpu_ns),
    ]
    return [*cells, _ms(row.self_device_ns), _ms(row.total_device_ns)] if with_device else cells


def _sorted(summary: Summary, sort_by: SortBy) -> list[Operator]:
    def size(row: Operator) -> int:
        return {"self": row.self_cpu_ns, "total": row.total_cpu_ns, "calls": row.calls}[sort_by]

    return sorted(summary.operators, key=size, reverse=True)


def _steps_line(steps: tuple[Step, ...]) -> str:
    if not steps:
        return "no steps: the loop did not call profiler.step()"
    longest = max(steps, key=lambda step: step.duration_ns)
    median = statistics.median_low(step.duration_ns for step in steps)
    return (
        f"{len(steps):,} steps, {steps[0].index} to {steps[-1].index}: "
        f"median {_ms(median)} ms, longest {_ms(longest.duration_ns)} ms (step {longest.index})"
    )


def _ms(nanoseconds: int) -> str:
    return f"{nanoseconds / 1e6:,.3f}"


def _printable(text: str) -> str:
    """A name from a trace may hold anything, and must not move the reader's cursor."""
    return "".join(character if character.isprintable() else "?" for character in text)
