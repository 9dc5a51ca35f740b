"""The pages of ``top`` besides the runs: one rank in detail, a text, and the help."""

from collections.abc import Sequence
from typing import Final

import numpy as np
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from torchperfd.model.formatting import duration, milliseconds
from torchperfd.v1 import control_pb2
from torchperfd_cli.commands._top_charts import Bar, colours, letters, name_of, sparkline
from torchperfd_cli.commands._top_runs import SELECTED
from torchperfd_cli.commands._top_state import Frame
from torchperfd_daemon.store import p50_and_p95
from torchperfd_daemon.views import live

_TREND_CELLS: Final = 48

_HELP: Final = (
    ("↑ ↓ PgUp PgDn", "select a rank; scroll a text"),
    ("Enter", "details of the selected rank, or of the one that the verdict names"),
    ("Esc", "back; again: nothing selected; again: no filter"),
    ("s", "sort ranks: by number, step, own work, wait"),
    ("/", "filter by run, node, state or rank; Enter keeps the filter, Esc removes it"),
    ("p", "pause, and go on"),
    ("k", "stacks of the selected run, or of the first"),
    ("c", "capture its next 5 steps"),
    ("m", "mouse on and off; off, it selects text"),
    ("click", "on a rank: its details, and back; on RANK, STEP, WAIT or VS PEERS: sort"),
    ("wheel", "select a rank; scroll a text"),
    ("?", "this help"),
    ("q", "quit"),
)


class Window:
    """As many lines of something as there is room for: around the selected rank, or from a line on."""

    def __init__(self, inner: RenderableType, height: int, offset: int | None = None) -> None:
        self._inner, self._height, self._offset = inner, height, offset

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self._inner, options.update(height=None), pad=False)
        first = self._offset if self._offset is not None else self._around(lines)
        for line in lines[max(0, first) : max(0, first) + self._height]:
            yield from line
            yield Segment.line()

    def _around(self, lines: Sequence[Sequence[Segment]]) -> int:
        """Return the first line of a window that has the selected rank in its middle."""
        marked = (n for n, line in enumerate(lines) if any(SELECTED in segment.text for segment in line))
        return min(next(marked, 0) - self._height // 2, max(0, len(lines) - self._height))


def help_page() -> RenderableType:
    """Return the keys and what they do."""
    grid = Table.grid(padding=(0, 2))
    for keys, words in _HELP:
        grid.add_row(Text(f" {keys}", style="bold"), words)
    bars = Text(
        "Bars: each rank's step by phase, on a common scale. ▶ marks a rank that the others wait for.\n"
        "WAIT is the wait for other ranks. VS PEERS compares a rank's own work with its peers' median."
    )
    return Group(grid, Padding(bars, (1, 1, 0, 1)))


def rank_page(frame: Frame, run_name: str, number: int) -> RenderableType:
    """Return one rank in detail: its state, its newest steps, and its phases with percentiles."""
    run = next((each for each in frame.runs if each.run == run_name), None)
    rank = next((each for each in run.ranks if each.rank == number), None) if run is not None else None
    message = next((each for each in frame.steps if _is(each, run_name, number)), None)
    if run is None or rank is None or message is None:
        return Text(f" rank {number} of {run_name} is not there any more", style="dim")
    facts = [
        ("rank", f"{number} of {run.world_size} in {run.run}"),
        ("process", f"{rank.pid} on {rank.node}" + (f", {rank.coordinates}" if rank.coordinates else "")),
        (
            "state",
            rank.state + (f", no step for {rank.stalled_seconds:.0f} s" if rank.stalled_seconds else ""),
        ),
        ("steps", f"{rank.steps:,}, the newest {_age(frame, run_name)}"),
        ("peers", _peers(rank)),
    ]
    head = Table.grid(padding=(0, 2))
    for name, words in facts:
        head.add_row(Text(f" {name}", style="dim"), words)
    message = live.steady(message)
    times = np.frombuffer(message.duration_ns, "<i8") / 1e9
    if not len(times):
        return head
    p50, p95 = p50_and_p95(times)
    trend = Text.assemble(
        "\n ",
        (sparkline(times.tolist(), _TREND_CELLS), "cyan"),
        f"  step {duration(float(times.mean()))}, p50 {duration(float(p50))}, p95 {duration(float(p95))}\n",
    )
    return Group(head, trend, _phases(run, message, float(times.mean())))


def _phases(run: live.RunView, message: control_pb2.RankSteps, step: float) -> RenderableType:
    table = Table(box=None, expand=True, padding=(0, 1), header_style="bold dim")
    table.add_column("PHASE", no_wrap=True)
    for name in ("MEAN MS", "%", "P50", "P95"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("SHARE OF THE STEP", ratio=1, no_wrap=True)
    by_phase = colours(run)
    marks = letters(by_phase)
    columns = {
        column.phase: np.frombuffer(column.ns, "<i8") / 1e9 for column in message.phases if len(column.ns)
    }
    for name, column in sorted(columns.items(), key=lambda item: -float(item[1].mean())):
        mean = float(column.mean())
        if not mean:
            continue
        p50, p95 = p50_and_p95(column)
        table.add_row(
            name_of(name),
            milliseconds(mean),
            f"{mean / step:.0%}" if step else "-",
            milliseconds(float(p50)),
            milliseconds(float(p95)),
            Bar([(marks.get(name, "#"), by_phase.get(name, "white"), mean)], step),
        )
    return table


def _is(message: control_pb2.RankSteps, run: str, rank: int) -> bool:
    identity = message.status.identity
    return identity.run == run and identity.rank == rank


def _age(frame: Frame, run: str) -> str:
    age = frame.ages.get(run)
    return f"{duration(age)} ago" if age is not None else "never"


def _peers(rank: live.RankView) -> str:
    if rank.slow is not None:
        return f"slow: {duration(rank.slow.excess_seconds)} a step more work, most of it in {rank.slow.phase}"
    if rank.behind_ratio is None:
        return "not compared"
    return f"{live.behind_text(rank.behind_ratio)} of own work beside their median"
