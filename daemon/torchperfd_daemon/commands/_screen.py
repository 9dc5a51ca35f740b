"""The picture that ``top`` draws: one frame of node, runs, ranks and verdicts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.panel import Panel
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from torchperfd.v1 import control_pb2
from torchperfd_daemon.commands import _table
from torchperfd_daemon.commands._node_view import GpuView, NodeView
from torchperfd_daemon.commands._view import WAIT, RankView, RunView

_COLOURS: Final[Mapping[str, str]] = {
    "data": "yellow",
    "h2d": "bright_yellow",
    "forward": "blue",
    "loss": "cyan",
    "backward": "magenta",
    "optimizer": "green",
    "zero_grad": "bright_green",
    "checkpoint": "red",
    "other": "white",
    WAIT: "bright_black",
}
_USERS: Final = ("bright_cyan", "bright_magenta", "bright_blue")
_NAMES: Final[Mapping[str, str]] = {WAIT: "wait"}
_GIB: Final = 1024**3
_BAR_WIDTH: Final = 20
_LEAST_WIDTH: Final = 8
_MOST_GPUS: Final = 8
_FULL: Final = 0.9
"""From this share on, a bar of memory is a warning."""


@dataclass(frozen=True, slots=True)
class Frame:
    """What is known at one moment.

    Attributes:
        clock: The time of day, for people.
        verdicts: By run.
        trouble: Why nothing newer is known, or who does not answer; empty while all is well.
        nodes: How many have answered for the fleet; 0 where only this one was asked.
    """

    node: str
    clock: str
    view: NodeView
    runs: Sequence[RunView]
    verdicts: Mapping[str, control_pb2.Verdict] = field(default_factory=dict)
    trouble: str = ""
    nodes: int = 0


def draw(frame: Frame, height: int | None = None) -> RenderableType:
    """Return a frame as something that rich can print.

    Args:
        frame: What to show.
        height: Lines there are; ranks that find no room are counted instead. None: as many as it takes.
    """
    ranks = sum(len(run.ranks) for run in frame.runs)
    head = Table.grid(expand=True)
    head.add_column(ratio=1)
    head.add_column(justify="right")
    what = f"{_table.count(len(frame.runs), 'run')}, {_table.count(ranks, 'rank')}"
    if frame.nodes:
        what += f" on {_table.count(frame.nodes, 'node')}"
    head.add_row(
        Text.assemble((" torchperfd ", "bold reverse"), f" {frame.node} · {what}"),
        Text(f"{frame.clock}  q quits ", style="dim"),
    )
    parts: list[RenderableType] = [head]
    if frame.trouble:
        parts.append(Text(f"! {frame.trouble}", style="bold red"))
    parts.append(_node(frame.view))
    if not frame.runs:
        parts.append(Text(" no runs; start one with `torchperfd run train.py`", style="dim"))
    room = None
    if height is not None and frame.runs:
        # What stands above, a line for each GPU, and of each run: two borders, heads, legend, verdict in
        # two lines, and what to type next.
        fixed = len(parts) + min(_MOST_GPUS + 1, len(frame.view.gpus)) + 7 * len(frame.runs)
        room = max(1, (height - fixed) // len(frame.runs))
    parts += [_run(run, frame.verdicts.get(run.run), room, with_node=bool(frame.nodes)) for run in frame.runs]
    return Group(*parts)


class _Bar:
    """Parts of a whole as a bar as wide as its cell; by letters where there are no colours."""

    def __init__(
        self, parts: Sequence[tuple[str, str, float]], whole: float, width: int | None = None
    ) -> None:
        self._parts, self._whole, self._width = parts, whole, width

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(self._width or options.max_width, options.max_width)
        plain = _plain(console)
        drawn, upto = 0, 0.0
        for name, colour, part in self._parts:
            upto += part
            end = min(width, round(width * upto / self._whole)) if self._whole > 0 else 0
            yield Segment(
                (_letter(name) if plain else "█") * (end - drawn), None if plain else Style.parse(colour)
            )
            drawn = max(drawn, end)
        yield Segment(("·" if plain else "─") * (width - drawn), None if plain else Style.parse("grey30"))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(_LEAST_WIDTH, self._width or options.max_width)


class _Legend:
    """Which phase has which colour, or which letter."""

    def __init__(self, colours: Mapping[str, str]) -> None:
        self._colours = colours

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        text = Text(no_wrap=True, overflow="ellipsis")
        for name, colour in self._colours.items():
            text.append(f"{_letter(name)} " if _plain(console) else "■ ", style=colour)
            text.append(f"{_NAMES.get(name, name)}  ", style="dim")
        yield text


def _plain(console: Console) -> bool:
    return console.no_color or console.color_system is None


def _letter(name: str) -> str:
    return "." if name == "other" else _NAMES.get(name, name)[:1]


def _node(view: NodeView) -> RenderableType:
    grid = Table.grid(padding=(0, 1))
    for name in ("name", "bar", "level", "memory", "bar", "bytes", "facts"):
        # Where the terminal is narrow, bars and facts give way, numbers do not.
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


def _level(value: float | None, whole: float | None) -> RenderableType:
    if value is None or not whole:
        return Text("-", justify="right")
    colour = "red" if whole > 1 and value >= _FULL * whole else "green"
    return _Bar([("#", colour, value)], whole, _BAR_WIDTH)


def _percent(value: float | None) -> Text:
    return Text(f"{value:4.0%}" if value is not None else "   -")


def _bytes(used: float | None, total: float | None) -> Text:
    if used is None or not total:
        return Text("-")
    return Text(f"{used / _GIB:.1f} of {total / _GIB:.0f} GiB")


def _run(
    run: RunView, verdict: control_pb2.Verdict | None, room: int | None, *, with_node: bool
) -> RenderableType:
    colours = _colours(run)
    longest = run.step_seconds
    table = Table(box=None, expand=True, padding=(0, 1), pad_edge=False, header_style="bold dim")
    table.add_column("RANK", justify="right", no_wrap=True)
    if with_node:
        table.add_column("NODE", no_wrap=True)
    for name, right in (("STATE", False), ("STEPS", True), ("STEP", True)):
        table.add_column(name, justify="right" if right else "left", no_wrap=True)
    table.add_column("WHAT A STEP IS SPENT ON", ratio=1, no_wrap=True)
    for name in ("WAIT", "VS PEERS"):
        table.add_column(name, justify="right", no_wrap=True)
    shown = _fitting(run.ranks, room)
    for rank in shown:
        number, *cells = _rank(rank, colours, longest)
        node = [rank.node] if with_node else []
        table.add_row(number, *node, *cells, style="bold red" if rank.slow else "")
    parts: list[RenderableType] = [table]
    if len(shown) < len(run.ranks):
        parts.append(Text(f"{len(run.ranks) - len(shown)} more ranks, none of them slow", style="dim"))
    parts.append(_Legend(colours))
    if verdict is not None:
        parts += _verdict(verdict, run.step_seconds)
    step = f" · {_table.duration(longest)} a step" if longest else ""
    title = f"{run.run} · {run.here} of {_table.count(run.world_size, 'rank')}{step}"
    return Panel(
        Group(*parts), title=Text(title, style="bold"), title_align="left", box=box.ROUNDED, padding=(0, 1)
    )


def _fitting(ranks: Sequence[RankView], room: int | None) -> list[RankView]:
    """Return the ranks that there is room for, slow ones before others, by number."""
    if room is None or len(ranks) <= room:
        return list(ranks)
    slow = [rank for rank in ranks if rank.slow]
    others = [rank for rank in ranks if not rank.slow]
    # One line tells how many are left out.
    return sorted([*slow, *others[: max(0, room - 1 - len(slow))]], key=lambda rank: rank.rank)


def _rank(rank: RankView, colours: Mapping[str, str], longest: float) -> list[RenderableType]:
    spent = [(_NAMES.get(name, name), colours[name], rank.phase_seconds.get(name, 0.0)) for name in colours]
    behind = rank.behind_ratio
    return [
        f"{'▶ ' if rank.slow else ''}{rank.rank}",
        rank.state,
        str(rank.steps),
        _table.duration(rank.step_seconds) if rank.window else "-",
        _Bar(spent, longest),
        _table.milliseconds(rank.phase_seconds[WAIT]) if rank.phase_seconds.get(WAIT) else "-",
        f"{behind:+.1%}" if behind is not None else "-",
    ]


def _colours(run: RunView) -> dict[str, str]:
    """Return the colour of each phase there is, in the order of a step, waiting last."""
    users = [name for name in run.phases if name not in _COLOURS]
    own = {name: _USERS[position % len(_USERS)] for position, name in enumerate(users)}
    waits = [WAIT] if any(rank.phase_seconds.get(WAIT) for rank in run.ranks) else []
    return {name: own.get(name) or _COLOURS[name] for name in (*run.phases, *waits)}


def _verdict(verdict: control_pb2.Verdict, step_seconds: float) -> list[RenderableType]:
    well = verdict.cause in ("none", "unknown")
    mark = Text("✓ " if verdict.cause == "none" else "? " if well else "✗ ", style="green" if well else "red")
    words = Text.assemble(mark, (verdict.summary, "" if well else "bold"))
    if verdict.cost_seconds_per_step and step_seconds:
        words.append(f" · {verdict.cost_seconds_per_step / step_seconds:.0%} of the step", style="red")
    return [words, Text(f"  next: {verdict.next_command}", style="dim")]
