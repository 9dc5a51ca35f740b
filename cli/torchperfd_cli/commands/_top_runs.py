"""The runs in ``top``: their verdicts first, then the ranks that these name, then the others."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from torchperfd.model.card import CauseCard, VerdictCard, card_of
from torchperfd.model.formatting import duration, milliseconds
from torchperfd.v1 import control_pb2
from torchperfd_cli.commands import _output
from torchperfd_cli.commands._top_charts import Bar, Legend, account_bar, colours, letters, name_of, sparkline
from torchperfd_cli.commands._top_input import OrderTarget, RankTarget, style_of
from torchperfd_cli.commands._top_state import Frame
from torchperfd_daemon.views.model import STALLED, STOPPED, WAIT, RankView, RunView, behind_text

_SHOWN: Final = ("line", "fix", "gain")
"""The parts of the first cause that have lines of their own."""
_TREND_CELLS: Final = 20
_MAX_NAME: Final = 9
_BEHIND: Final = 0.05
_FAR_BEHIND: Final = 0.2
"""From these shares of a rank's peers' own work on, what it has more is yellow, and red."""
_BARS: Final = "WHAT A STEP IS SPENT ON"
_COLUMNS: Final = ("STATE", "STEPS", "STEP", _BARS, "MOST OF IT", "WAIT", "VS PEERS")
_LEFT: Final = ("NODE", "STATE", _BARS, "MOST OF IT")
_ORDERS: Final = {"RANK": "rank", "STEP": "step", "WAIT": "wait", "VS PEERS": "own work"}
"""The orders of ranks, by the columns on which a click sorts."""
SELECTED: Final = "»"
"""Marks the selected rank, in front of its number."""


@dataclass(frozen=True, slots=True)
class Panels:
    """Runs, drawn.

    Attributes:
        parts: One for each run, in their order.
        complete: Whether each run shows its verdict and the ranks that it names.
    """

    parts: list[RenderableType]
    complete: bool


@dataclass(frozen=True, slots=True)
class _Shape:
    """How much of a run is shown, its name and verdict apart.

    Attributes:
        framed: A frame around it, and the causes beside the first.
        others: How many of the other ranks; None for all.
    """

    framed: bool = False
    ranked: bool = False
    command: bool = False
    account: bool = False
    legend: bool = False
    trend: bool = False
    others: int | None = 0


_ALL: Final = _Shape(
    framed=True, ranked=True, command=True, account=True, legend=True, trend=True, others=None
)
_GROWING: Final = (
    _Shape(framed=True),
    _Shape(framed=True, ranked=True),
    _Shape(framed=True, ranked=True, command=True),
    _Shape(framed=True, ranked=True, command=True, account=True),
    _Shape(framed=True, ranked=True, command=True, account=True, trend=True),
    _Shape(framed=True, ranked=True, command=True, account=True, trend=True, legend=True),
)


def panels(
    frame: Frame,
    height: int | None,
    console: Console,
    options: ConsoleOptions,
    selected: tuple[str, int] | None = None,
) -> Panels:
    """Return panels of a frame's runs that fit a number of lines.

    Args:
        height: Number of lines available; None for no limit.
        selected: The run and rank that are marked.
    """
    runs, verdicts = frame.runs, frame.verdicts

    def drawn(index: int, shape: _Shape) -> RenderableType:
        run = runs[index]
        return _run(run, frame, shape, selected)

    if height is None:
        return Panels([drawn(index, _ALL) for index in range(len(runs))], complete=True)

    @functools.cache
    def lines(index: int, shape: _Shape) -> int:
        return lines_of(drawn(index, shape), console, options)

    if sum(lines(index, _ALL) for index in range(len(runs))) <= height:
        return Panels([drawn(index, _ALL) for index in range(len(runs))], complete=True)

    order = sorted(range(len(runs)), key=lambda index: _is_well(verdicts.get(runs[index].run)))
    shapes: dict[int, _Shape] = {}
    left = height
    for index in order:
        needed = lines(index, _Shape())
        # One line has the number of those left out.
        if left - needed >= (len(shapes) + 1 < len(runs)):
            shapes[index] = _Shape()
            left -= needed
    for shape in _GROWING if len(shapes) == len(runs) else ():
        for index in order:
            more = lines(index, shape) - lines(index, shapes[index])
            if more <= left and (shape is _GROWING[0] or shapes[index].framed):
                shapes[index] = shape
                left -= more
    complete = all(shape.ranked for shape in shapes.values()) and len(shapes) == len(runs)
    for position, index in enumerate(order if complete else ()):
        left -= _add_ranks(shapes, index, left // (len(order) - position), lines)
    parts = [drawn(index, shapes[index]) for index in sorted(shapes)]
    if len(shapes) < len(runs):
        hidden = [verdicts.get(run.run) for index, run in enumerate(runs) if index not in shapes]
        unhealthy = sum(not _is_well(verdict) for verdict in hidden)
        text = f" {_output.count(len(hidden), 'more run')}, {unhealthy or 'none'} of them with a verdict"
        parts.append(Text(text, style="dim", no_wrap=True, overflow="ellipsis"))
    return Panels(parts, complete)


def lines_of(part: RenderableType, console: Console, options: ConsoleOptions) -> int:
    """Return how many lines something takes at a console's width."""
    return len(console.render_lines(part, options.update(height=None), pad=False))


def _add_ranks(shapes: dict[int, _Shape], index: int, most: int, lines: Callable[[int, _Shape], int]) -> int:
    """Show as many more ranks of a run as so many lines allow; return how many lines that took."""
    shape = shapes[index]
    now = lines(index, shape)
    every = replace(shape, others=None)
    if lines(index, every) - now > most:
        every = replace(shape, others=max(0, most))
    shapes[index] = every
    return lines(index, every) - now


def _is_well(verdict: control_pb2.Verdict | None) -> bool:
    card = card_of(verdict) if verdict is not None else None
    return card is None or not (card.causes or card.failure)


def _run(run: RunView, frame: Frame, shape: _Shape, selected: tuple[str, int] | None) -> RenderableType:
    verdict = frame.verdicts.get(run.run)
    step = f" · {duration(run.step_seconds)} a step" if run.step_seconds else ""
    age = frame.ages.get(run.run)
    last = f" · last step {duration(age)} ago" if age is not None else ""
    title = f"{run.run} · {run.here} of {_output.count(run.world_size, 'rank')}{step}{last}"
    card = card_of(verdict) if verdict is not None else None
    parts = [_verdict(card)]
    further = card.causes[0 if card.failure else 1 :] if card is not None else ()
    if not shape.framed:
        parts += [_also(cause) for cause in further if not cause.cost_seconds]
        name = Text(f" {title}", style="bold", no_wrap=True, overflow="ellipsis")
        return Group(name, *parts)
    if card is not None:
        parts += [_also(cause) for cause in further]
        if card.note:
            parts.insert(0, Text(f"note: {card.note}"))
        if shape.command:
            named = [part for cause in card.causes[:1] for part in cause.parts if part[0] in _SHOWN]
            parts += [Text(f"  {name}: {words}") for name, words in named]
            parts += [Text(f"  also: {words}") for words in card.also]
            if card.next_command:
                parts.append(Text(f"  next: {card.next_command}", style="dim"))
    if shape.account and card is not None and card.account is not None:
        parts += account_bar(card.account)
    if shape.trend:
        parts += [*_trends(run.run, frame), *_memory(run)]
    if shape.ranked:
        marked = selected[1] if selected is not None and selected[0] == run.run else None
        parts += _ranks(run, verdict, shape.others, marked, with_node=bool(frame.nodes))
    if shape.legend:
        parts.append(Legend(colours(run)))
    return Panel(
        Group(*parts), title=Text(title, style="bold"), title_align="left", box=box.ROUNDED, padding=(0, 1)
    )


def _trends(run: str, frame: Frame) -> list[RenderableType]:
    """Return a line with the newest step times and throughput; none where neither is known."""
    steps, rates = frame.step_seconds.get(run, ()), frame.samples_per_second.get(run, ())
    if not steps:
        return []
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(" step ", style="dim").append(sparkline(steps, _TREND_CELLS), style="cyan")
    line.append(f" {duration(steps[-1])}")
    if rates:
        line.append("  samples/s ", style="dim").append(sparkline(rates, _TREND_CELLS), style="cyan")
        line.append(f" {rates[-1]:,.0f}" if rates[-1] >= 99.5 else f" {rates[-1]:.3g}")
    return [line]


def _memory(run: RunView) -> list[RenderableType]:
    """Return a line with the memory of the process that grows most, else of the largest; none if unknown."""
    known = [(rank.host_memory, rank.rank) for rank in run.ranks if rank.host_memory is not None]
    if not any(memory.course_bytes for memory, _ in known):
        return []
    memory, number = max(known, key=lambda each: (each[0].growth_bytes_per_second, each[0].resident_bytes))
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(" memory ", style="dim").append(sparkline(memory.course_bytes, _TREND_CELLS), style="cyan")
    line.append(f" {memory.words}")
    return [line.append(f"  rank {number}", style="dim") if len(run.ranks) > 1 else line]


def _ranks(
    run: RunView,
    verdict: control_pb2.Verdict | None,
    others: int | None,
    marked: int | None,
    *,
    with_node: bool,
) -> list[RenderableType]:
    """Return a table of a run's ranks, and how many are left out."""
    table = Table(box=None, expand=True, padding=(0, 1), pad_edge=False, header_style="bold dim")
    for name in ("RANK", *(("NODE",) if with_node else ()), *_COLUMNS):
        table.add_column(
            name,
            justify="left" if name in _LEFT else "right",
            header_style=style_of(OrderTarget(_ORDERS[name])) if name in _ORDERS else None,
            ratio=1 if name == _BARS else None,
            no_wrap=True,
        )
    matter = _that_matter(run, verdict)
    rest = [rank for rank in run.ranks if rank not in matter]
    if others is not None:
        # A run without a slow rank shows one all the same.
        rest = rest[: max(others, 0 if matter else 1)]
    chosen = {rank.rank for rank in (*matter, *rest)}
    shown = [rank for rank in run.ranks if rank.rank in chosen]
    by_phase = colours(run)
    for rank in shown:
        number, *cells = _rank(rank, by_phase, run.step_seconds, is_marked=rank.rank == marked)
        node = [rank.node] if with_node else []
        row = style_of(RankTarget(run.run, rank.rank), "bold red" if rank.slow else "")
        table.add_row(number, *node, *cells, style=row)
    hidden = len(run.ranks) - len(shown)
    if not hidden:
        return [table]
    return [table, Text(f"{_output.count(hidden, 'more rank')}, none of them slow", style="dim")]


def _that_matter(run: RunView, verdict: control_pb2.Verdict | None) -> list[RankView]:
    """Return the ranks that are always shown: those that a verdict names, that are slow, or stopped."""
    causes = [] if verdict is None else [verdict, *verdict.others]
    named = {each.rank for each in causes if each.rank >= 0}
    return [rank for rank in run.ranks if rank.slow or rank.rank in named or rank.state == STOPPED]


def _rank(
    rank: RankView, by_phase: Mapping[str, str], longest: float, *, is_marked: bool
) -> list[RenderableType]:
    marks = letters(by_phase)
    spent = [(marks[name], by_phase[name], rank.phase_seconds.get(name, 0.0)) for name in by_phase]
    behind = rank.behind_ratio
    return [
        f"{SELECTED if is_marked else ''}{'▶ ' if rank.slow else ''}{rank.rank}",
        Text(rank.state, style="bold red" if rank.state in (STOPPED, STALLED) else ""),
        str(rank.steps),
        duration(rank.step_seconds) if rank.window else "-",
        Bar(spent, longest),
        _most(rank),
        milliseconds(rank.phase_seconds[WAIT]) if rank.phase_seconds.get(WAIT) else "-",
        Text(behind_text(behind), style=_level_of(behind)) if behind is not None else "-",
    ]


def _most(rank: RankView) -> str:
    """Return the longest phase of a rank's step, and its share."""
    if not rank.phase_seconds or not rank.step_seconds:
        return "-"
    name, seconds = max(rank.phase_seconds.items(), key=lambda item: item[1])
    return f"{name_of(name)[:_MAX_NAME]} {seconds / rank.step_seconds:.0%}"


def _level_of(behind: float) -> str:
    return "red" if behind >= _FAR_BEHIND else "yellow" if behind >= _BEHIND else ""


def _verdict(card: VerdictCard | None) -> RenderableType:
    if card is None:
        return Text("? no verdict yet", style="green")
    if card.failure:
        return Text.assemble(("✗ ", "red"), card.summary)
    if not card.causes:
        return Text.assemble(("✓ " if card.is_healthy else "? ", "green"), card.summary)
    return Text("✗ ", style="red").append_text(_cause(card.causes[0]))


def _also(cause: CauseCard) -> Text:
    return Text("  also: ").append_text(_cause(cause))


def _cause(cause: CauseCard) -> Text:
    return Text.assemble((cause.heading, "bold"), f" · {cause.why}" if cause.why else "")
