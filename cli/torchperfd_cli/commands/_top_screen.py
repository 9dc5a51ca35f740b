"""The screen of ``top``: one frame of node, runs, ranks and verdicts, or a page besides these."""

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from torchperfd.model.formatting import duration, milliseconds
from torchperfd.v1 import control_pb2
from torchperfd_cli.commands import _output
from torchperfd_cli.commands._output import NO_RUNS
from torchperfd_cli.commands._top_charts import LEVEL, Bar, colours, letters, name_of, sparkline
from torchperfd_cli.commands._top_runs import SELECTED, lines_of, panels
from torchperfd_cli.commands._top_state import Frame, GpuView, NodeView, Page, TopState
from torchperfd_daemon.store.store import p50_and_p95
from torchperfd_daemon.views.model import RankView, RunView, behind_text, steady

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

    def lines(self, console: Console, options: ConsoleOptions) -> list[list[Segment]]:
        """Return the lines, at a console's width."""
        lines = console.render_lines(self._inner, options.update(height=None), pad=False)
        first = self._offset if self._offset is not None else self._around(lines)
        return lines[max(0, first) : max(0, first) + self._height]

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
    message = steady(message)
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


def _phases(run: RunView, message: control_pb2.RankSteps, step: float) -> RenderableType:
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


def _peers(rank: RankView) -> str:
    if rank.slow is not None:
        return f"slow: {duration(rank.slow.excess_seconds)} a step more work, most of it in {rank.slow.phase}"
    if rank.behind_ratio is None:
        return "not compared"
    return f"{behind_text(rank.behind_ratio)} of own work beside their median"


_GIB: Final = 1024**3
_BAR_WIDTH: Final = 20
_MAX_GPUS: Final = 8
_FULL: Final = 0.9
_NEARLY_FULL: Final = 0.75
"""From these shares on, a bar of memory or of CPUs is red, and yellow."""
_KEYS: Final = (
    ("↑↓", "rank"),
    ("⏎", "open"),
    ("s", "sort"),
    ("/", "filter"),
    ("p", "pause"),
    ("k", "stacks"),
    ("c", "capture"),
    ("m", "mouse"),
    ("?", "help"),
    ("q", "quit"),
)


def draw(frame: Frame, height: int | None = None, state: TopState | None = None) -> RenderableType:
    """Return a frame as something that rich can print.

    Args:
        height: Number of lines available. Verdicts come first, then the ranks that they name, then the rest;
            hidden rows are counted. None for no limit.
        state: What a person has chosen; None where no key can be pressed.
    """
    return _Drawn(frame, height, state)


class _Drawn:
    """A frame, laid out for the width of the console that prints it."""

    def __init__(self, frame: Frame, height: int | None, state: TopState | None) -> None:
        self._frame, self._height, self._state = frame, height, state

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        state, height = self._state, self._height
        frame = self._frame if state is None else state.arrange(self._frame)
        head: list[RenderableType] = [_head(self._frame, state)]
        if frame.problem:
            head.append(Text(f"! {frame.problem}", style="bold red"))
        yield from head
        if state is None or height is None:
            yield from self._body(frame, height, head, console, options)
            return
        foot = _foot(state)
        room = max(1, height - sum(lines_of(part, console, options) for part in (*head, foot)))
        body = Group(*self._body(frame, height - 1, head, console, options))
        offset = 0
        if state.page is Page.HELP:
            body = Group(help_page())
        elif state.page is Page.TEXT:
            body, offset = Group(*map(Text, state.text)), state.offset
        elif state.page is Page.RANK and state.selected is not None:
            body = Group(rank_page(frame, *state.selected))
        elif state.selected is not None:
            body = Group(*panels(frame, None, console, options, state.selected).parts)
            yield from self._framed(Window(body, room), foot, room, console, options)
            return
        yield from self._framed(Window(body, room, offset), foot, room, console, options)

    def _framed(
        self, body: Window, foot: RenderableType, room: int, console: Console, options: ConsoleOptions
    ) -> RenderResult:
        """Yield the body, as many empty lines as it leaves, and the last line of the screen."""
        lines = body.lines(console, options)
        for line in lines:
            yield from line
            yield Segment.line()
        empty = room - len(lines)
        if empty > 0:
            yield Text("\n" * (empty - 1))
        yield foot

    def _body(
        self,
        frame: Frame,
        height: int | None,
        head: Sequence[RenderableType],
        console: Console,
        options: ConsoleOptions,
    ) -> Iterator[RenderableType]:
        node = _node(frame.view)
        if not frame.runs:
            yield node
            yield Text(f" {NO_RUNS}" if not self._frame.runs else " no run matches the filter", style="dim")
            return
        if height is None:
            yield node
            yield from panels(frame, None, console, options).parts
            return
        room = height - sum(lines_of(part, console, options) for part in head)
        # The node is shortened first, so that verdicts and the ranks that they name fit.
        for shown in (node, _node(frame.view, short=True), None):
            left = room - (lines_of(shown, console, options) if shown is not None else 0)
            runs = panels(frame, left, console, options)
            if runs.complete or shown is None:
                if shown is not None:
                    yield shown
                yield from runs.parts
                return


def _foot(state: TopState) -> RenderableType:
    """Return the last line: the filter that is typed, else what there is to say, else the keys."""
    if state.is_typing:
        return Text(f" filter: {state.pattern}▏", style="bold", no_wrap=True, overflow="ellipsis")
    if state.message:
        return Text(f" {state.message}", style="bold", no_wrap=True, overflow="ellipsis")
    text = Text(no_wrap=True, overflow="ellipsis")
    for key, words in _KEYS:
        text.append(key, style="reverse").append(f" {words} ", style="dim")
    return text


def _head(frame: Frame, state: TopState | None) -> RenderableType:
    ranks = sum(len(run.ranks) for run in frame.runs)
    head = Table.grid(expand=True)
    head.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    head.add_column(justify="right", no_wrap=True)
    what = f"{_output.count(len(frame.runs), 'run')}, {_output.count(ranks, 'rank')}"
    if frame.nodes:
        what += f" on {_output.count(frame.nodes, 'node')}"
    head.add_row(
        Text.assemble((" torchperfd ", "bold reverse"), f" {frame.node} · {what}"),
        Text.assemble((_chosen(state), "yellow"), (f"{frame.clock} ", "dim")),
    )
    return head


def _chosen(state: TopState | None) -> str:
    """Return what differs from the usual picture, for the head."""
    if state is None:
        return ""
    parts = ["paused" if state.is_paused else "", f"filter {state.pattern}" if state.pattern else ""]
    parts.append(f"by {state.order_name}" if state.order else "")
    return "".join(f"{part}  " for part in parts if part)


def _node(view: NodeView, *, short: bool = False) -> RenderableType:
    grid = Table.grid(padding=(0, 1))
    for name in ("name", "bar", "level", "memory", "bar", "bytes", "facts"):
        # On a narrow terminal, bars and facts are dropped, numbers are kept.
        grid.add_column(no_wrap=name not in ("bar", "facts"))
    if view.cpu is not None or view.memory_total:
        grid.add_row(
            " CPU",
            _level(view.cpu, 1.0, rising=True),
            _percent(view.cpu),
            " memory",
            _level(view.memory_used, view.memory_total),
            _bytes(view.memory_used, view.memory_total),
            "",
        )
    if short and len(view.gpus) > 1:
        grid.add_row(*_all_gpus(view.gpus))
        return grid
    for gpu in view.gpus[:_MAX_GPUS]:
        grid.add_row(*_gpu(gpu))
    rest = len(view.gpus) - _MAX_GPUS
    if rest > 0:
        grid.add_row(f" {rest} more GPUs")
    return grid if grid.row_count else Text(" nothing is measured of this node yet", style="dim")


def _gpu(gpu: GpuView) -> list[RenderableType]:
    facts = [
        f"{gpu.watts:4.0f} W" if gpu.watts is not None else "",
        f"{gpu.celsius:3.0f} °C" if gpu.celsius is not None else "",
        gpu.model,
    ]
    return [
        f" GPU {gpu.gpu}",
        _level(gpu.busy, 1.0),
        _percent(gpu.busy),
        " memory",
        _level(gpu.memory_used, gpu.memory_total),
        _bytes(gpu.memory_used, gpu.memory_total),
        Text(" ".join(filter(None, facts)), style="dim", no_wrap=True, overflow="ellipsis"),
    ]


def _all_gpus(gpus: Sequence[GpuView]) -> list[RenderableType]:
    """Return one line for all GPUs: how busy they are on average, and the fullest one's memory."""
    busy = [gpu.busy for gpu in gpus if gpu.busy is not None]
    mean = sum(busy) / len(busy) if busy else None
    fullest = max(gpus, key=lambda gpu: (gpu.memory_used or 0.0) / (gpu.memory_total or 1.0))
    return [
        f" {len(gpus)} GPUs",
        _level(mean, 1.0),
        _percent(mean),
        " memory",
        _level(fullest.memory_used, fullest.memory_total),
        _bytes(fullest.memory_used, fullest.memory_total),
        "",
    ]


def _level(value: float | None, whole: float | None, *, rising: bool = False) -> RenderableType:
    """Return a bar, coloured by thresholds if a high level is a warning: of memory, and with ``rising``."""
    if value is None or not whole:
        return Text("-", justify="right")
    part = value / whole if whole > 1 or rising else 0.0
    colour = "red" if part >= _FULL else "yellow" if part >= _NEARLY_FULL else "green"
    return Bar([(LEVEL, colour, value)], whole, _BAR_WIDTH)


def _percent(value: float | None) -> Text:
    return Text(f"{value:4.0%}" if value is not None else "   -")


def _bytes(used: float | None, total: float | None) -> Text:
    if used is None or not total:
        return Text("-")
    return Text(f"{used / _GIB:.1f} of {total / _GIB:.0f} GiB")
