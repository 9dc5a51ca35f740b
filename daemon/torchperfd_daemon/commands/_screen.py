"""The screen of ``top``: one frame of node, runs, ranks and verdicts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from torchperfd.v1 import control_pb2
from torchperfd_daemon.commands import _table
from torchperfd_daemon.commands._bars import Bar
from torchperfd_daemon.commands._run_panels import lines_of, panels
from torchperfd_daemon.views.live import RunView
from torchperfd_daemon.views.node_view import GpuView, NodeView

_GIB: Final = 1024**3
_BAR_WIDTH: Final = 20
_MOST_GPUS: Final = 8
_FULL: Final = 0.9
"""From this share on, a bar of memory is a warning."""


@dataclass(frozen=True, slots=True)
class Frame:
    """The data of one moment.

    Attributes:
        clock: The time of day, for people.
        problem: Why the data is stale, or which daemons do not answer; empty without a problem.
        nodes: How many have answered for the fleet; 0 where only this one was asked.
    """

    node: str
    clock: str
    view: NodeView
    runs: Sequence[RunView]
    verdicts: Mapping[str, control_pb2.Verdict] = field(default_factory=dict)
    problem: str = ""
    nodes: int = 0


def draw(frame: Frame, height: int | None = None) -> RenderableType:
    """Return a frame as something that rich can print.

    Args:
        height: Number of lines available. Verdicts come first, then the ranks that they name, then the rest;
            hidden rows are counted. None for no limit.
    """
    return _Drawn(frame, height)


class _Drawn:
    """A frame, laid out for the width of the console that prints it."""

    def __init__(self, frame: Frame, height: int | None) -> None:
        self._frame, self._height = frame, height

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        frame = self._frame
        head: list[RenderableType] = [_head(frame)]
        if frame.problem:
            head.append(Text(f"! {frame.problem}", style="bold red"))
        yield from head
        node = _node(frame.view)
        if not frame.runs:
            yield node
            yield Text(" no runs; start one with `torchperfd run train.py`", style="dim")
            return
        fleet = bool(frame.nodes)
        if self._height is None:
            yield node
            yield from panels(frame.runs, frame.verdicts, None, console, options, with_node=fleet).parts
            return
        room = self._height - sum(lines_of(part, console, options) for part in head)
        # The node is shortened first, so that verdicts and the ranks that they name fit.
        for shown in (node, _node(frame.view, short=True), None):
            left = room - (lines_of(shown, console, options) if shown is not None else 0)
            runs = panels(frame.runs, frame.verdicts, left, console, options, with_node=fleet)
            if runs.complete or shown is None:
                if shown is not None:
                    yield shown
                yield from runs.parts
                return


def _head(frame: Frame) -> RenderableType:
    ranks = sum(len(run.ranks) for run in frame.runs)
    head = Table.grid(expand=True)
    head.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    head.add_column(justify="right", no_wrap=True)
    what = f"{_table.count(len(frame.runs), 'run')}, {_table.count(ranks, 'rank')}"
    if frame.nodes:
        what += f" on {_table.count(frame.nodes, 'node')}"
    head.add_row(
        Text.assemble((" torchperfd ", "bold reverse"), f" {frame.node} · {what}"),
        Text(f"{frame.clock}  q quits ", style="dim"),
    )
    return head


def _node(view: NodeView, *, short: bool = False) -> RenderableType:
    grid = Table.grid(padding=(0, 1))
    for name in ("name", "bar", "level", "memory", "bar", "bytes", "facts"):
        # On a narrow terminal, bars and facts are dropped, numbers are kept.
        grid.add_column(no_wrap=name not in ("bar", "facts"))
    if view.cpu is not None or view.memory_total:
        grid.add_row(
            " CPU",
            _level(view.cpu, 1.0),
            _percent(view.cpu),
            " memory",
            _level(view.memory_used, view.memory_total),
            _bytes(view.memory_used, view.memory_total),
            "",
        )
    if short and len(view.gpus) > 1:
        grid.add_row(*_all_gpus(view.gpus))
        return grid
    for gpu in view.gpus[:_MOST_GPUS]:
        grid.add_row(*_gpu(gpu))
    rest = len(view.gpus) - _MOST_GPUS
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


def _level(value: float | None, whole: float | None) -> RenderableType:
    if value is None or not whole:
        return Text("-", justify="right")
    colour = "red" if whole > 1 and value >= _FULL * whole else "green"
    return Bar([("#", colour, value)], whole, _BAR_WIDTH)


def _percent(value: float | None) -> Text:
    return Text(f"{value:4.0%}" if value is not None else "   -")


def _bytes(used: float | None, total: float | None) -> Text:
    if used is None or not total:
        return Text("-")
    return Text(f"{used / _GIB:.1f} of {total / _GIB:.0f} GiB")
