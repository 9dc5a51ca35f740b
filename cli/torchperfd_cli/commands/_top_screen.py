"""The screen of ``top``: one frame of node, runs, ranks and verdicts."""

from collections.abc import Iterator, Sequence
from typing import Final

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from torchperfd_cli.commands import _output
from torchperfd_cli.commands._output import NO_RUNS
from torchperfd_cli.commands._top_charts import LEVEL, Bar
from torchperfd_cli.commands._top_pages import Window, help_page, rank_page
from torchperfd_cli.commands._top_runs import lines_of, panels
from torchperfd_cli.commands._top_state import Frame, GpuView, NodeView, Page, TopState

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
        yield body
        empty = room - lines_of(body, console, options)
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
