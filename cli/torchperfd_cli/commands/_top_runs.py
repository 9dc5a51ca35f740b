"""The runs in ``top``: their verdicts first, then the ranks that these name, then the others."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from rich.segment import Segment

from torchperfd.model.card import CauseCard, VerdictCard, card_of
from torchperfd.model.formatting import duration, milliseconds
from torchperfd_cli.commands import _output
from torchperfd_cli.commands._top_charts import account_lines, colours, legend, letters, name_of, sparkline
from torchperfd_cli.commands._top_lines import (
    Bar,
    Canvas,
    Cell,
    Column,
    Line,
    OrderTarget,
    RankTarget,
    Row,
    Words,
    columns,
    cut,
    framed,
    line,
    style_of,
    wrapped,
)
from torchperfd_cli.commands._top_state import Frame
from torchperfd_daemon.views.model import STALLED, STOPPED, WAIT, RankView, RunView, behind_text

_SHOWN: Final = ("line", "fix", "gain")
"""The parts of the first cause that have lines of their own."""
_TREND_CELLS: Final = 20
_MAX_NAME: Final = 9
_BEHIND: Final = 0.05
_FAR_BEHIND: Final = 0.2
"""From these shares of a rank's peers' own work on, what it has more is yellow, and red."""
_FRAME_CELLS: Final = 4
"""What a frame takes of the width."""
_LEAST_BAR: Final = 8
_TABLE: Final[Mapping[str, Column]] = {
    "RANK": Column(is_right=True),
    "NODE": Column(dropped=1),
    "STATE": Column(),
    "STEPS": Column(is_right=True, dropped=2),
    "STEP": Column(is_right=True),
    "WHAT A STEP IS SPENT ON": Column(least=_LEAST_BAR, grows=True),
    "MOST OF IT": Column(dropped=3),
    "WAIT": Column(is_right=True),
    "VS PEERS": Column(is_right=True),
}
_GAP: Final = 2
_ORDERS: Final = {"RANK": "rank", "STEP": "step", "WAIT": "wait", "VS PEERS": "own work"}
"""The orders of ranks, by the columns on which a click sorts."""
SELECTED: Final = "»"
"""Marks the selected rank, in front of its number."""


@dataclass(frozen=True, slots=True)
class Panels:
    """Runs, drawn.

    Attributes:
        lines: Those of all runs that are shown, in their order.
        complete: Whether each run shows its verdict and the ranks that it names.
    """

    lines: list[Line]
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


def drawn_runs(frame: Frame, canvas: Canvas, selected: tuple[str, int] | None = None) -> "list[DrawnRun]":
    """Return a frame's runs, of which the selected rank is marked."""
    return [
        DrawnRun(run, frame, canvas, selected[1] if selected is not None and selected[0] == run.run else None)
        for run in frame.runs
    ]


def panels(runs: "Sequence[DrawnRun]", height: int | None, canvas: Canvas) -> Panels:
    """Return panels of runs that fit a number of lines.

    Args:
        height: Number of lines available; None for no limit.
    """
    if height is None or sum(run.height(_ALL) for run in runs) <= height:
        return Panels([each for run in runs for each in run.lines(_ALL)], complete=True)
    order = sorted(range(len(runs)), key=lambda index: runs[index].is_well)
    shapes: dict[int, _Shape] = {}
    left = height
    for index in order:
        needed = runs[index].height(_Shape())
        # One line has the number of those left out.
        if left - needed >= (len(shapes) + 1 < len(runs)):
            shapes[index] = _Shape()
            left -= needed
    for shape in _GROWING if len(shapes) == len(runs) else ():
        for index in order:
            more = runs[index].height(shape) - runs[index].height(shapes[index])
            if more <= left and (shape is _GROWING[0] or shapes[index].framed):
                shapes[index] = shape
                left -= more
    complete = all(shape.ranked for shape in shapes.values()) and len(shapes) == len(runs)
    for position, index in enumerate(order if complete else ()):
        shape = _with_ranks(runs[index], shapes[index], left // (len(order) - position))
        left -= runs[index].height(shape) - runs[index].height(shapes[index])
        shapes[index] = shape
    lines = [each for index in sorted(shapes) for each in runs[index].lines(shapes[index])]
    if len(shapes) < len(runs):
        hidden = [run for index, run in enumerate(runs) if index not in shapes]
        unhealthy = sum(not run.is_well for run in hidden)
        text = f" {_output.count(len(hidden), 'more run')}, {unhealthy or 'none'} of them with a verdict"
        lines.append(cut(line((text, "dim")), canvas.width))
    return Panels(lines, complete)


def _with_ranks(run: "DrawnRun", shape: _Shape, most: int) -> _Shape:
    """Return a shape with as many more ranks of a run as so many lines allow."""
    every = replace(shape, others=None)
    return every if run.height(every) - run.height(shape) <= most else replace(shape, others=max(0, most))


class DrawnRun:
    """A run as lines, as many as its shape has; each part of it is laid out once.

    Args:
        marked: The rank that is selected; None for none.
    """

    def __init__(self, run: RunView, frame: Frame, canvas: Canvas, marked: int | None) -> None:
        self._run, self._frame, self._canvas, self._marked = run, frame, canvas, marked
        self._inner = replace(canvas, width=canvas.width - _FRAME_CELLS)
        self._verdict = frame.verdicts.get(run.run)
        self._card = card_of(self._verdict) if self._verdict is not None else None

    @property
    def is_well(self) -> bool:
        """Whether nothing is wrong with it, as far as is known."""
        return self._card is None or not (self._card.causes or self._card.failure)

    def height(self, shape: _Shape) -> int:
        """Return how many lines a shape has."""
        if not shape.framed:
            return 1 + len(self._short)
        lines = 2 + len(self._upper(shape)) + len(self._legend if shape.legend else ())
        if not shape.ranked:
            return lines
        shown = len(self._shown(shape.others))
        return lines + 1 + shown + (shown < len(self._run.ranks))

    def lines(self, shape: _Shape) -> list[Line]:
        if not shape.framed:
            return [cut(line((f" {self._title}", "bold")), self._canvas.width), *self._short]
        body = self._upper(shape)
        if shape.ranked:
            body += self._ranks(shape.others)
        if shape.legend:
            body += self._legend
        return framed(self._title, body, self._canvas.width)

    @property
    def _title(self) -> str:
        run = self._run
        step = f" · {duration(run.step_seconds)} a step" if run.step_seconds else ""
        age = self._frame.ages.get(run.run)
        last = f" · last step {duration(age)} ago" if age is not None else ""
        return f"{run.run} · {run.here} of {_output.count(run.world_size, 'rank')}{step}{last}"

    @property
    def _further(self) -> Sequence[CauseCard]:
        card = self._card
        return card.causes[0 if card.failure else 1 :] if card is not None else ()

    @functools.cached_property
    def _short(self) -> list[Line]:
        """The verdict without a frame, and what else is found that has no cost."""
        found = _paragraphs(self._canvas.width, _verdict(self._card))
        free = [_also(cause) for cause in self._further if not cause.cost_seconds]
        return found + _paragraphs(self._canvas.width, *free)

    def _upper(self, shape: _Shape) -> list[Line]:
        """Return what stands above the ranks, in a frame."""
        lines = list(self._causes)
        if shape.command:
            lines += self._commands
        if shape.account:
            lines += self._account
        if shape.trend:
            lines += self._trends
        return lines

    @functools.cached_property
    def _causes(self) -> list[Line]:
        parts = [_verdict(self._card), *map(_also, self._further)]
        if self._card is not None and self._card.note:
            parts.insert(0, ((f"note: {self._card.note}", ""),))
        return _paragraphs(self._inner.width, *parts)

    @functools.cached_property
    def _commands(self) -> list[Line]:
        card = self._card
        if card is None:
            return []
        named = [part for cause in card.causes[:1] for part in cause.parts if part[0] in _SHOWN]
        parts = [
            ((f"  {name}: {words}", ""),) for name, words in (*named, *(("also", each) for each in card.also))
        ]
        if card.next_command:
            parts.append(((f"  next: {card.next_command}", "dim"),))
        return _paragraphs(self._inner.width, *parts)

    @functools.cached_property
    def _account(self) -> list[Line]:
        account = self._card.account if self._card is not None else None
        return account_lines(account, self._inner) if account is not None else []

    @functools.cached_property
    def _trends(self) -> list[Line]:
        return [cut(each, self._inner.width) for each in (*self._steps_trend(), *self._memory_trend())]

    def _steps_trend(self) -> list[Line]:
        """Return a line with the newest step times and throughput; none where neither is known."""
        run = self._run.run
        steps, rates = self._frame.step_seconds.get(run, ()), self._frame.samples_per_second.get(run, ())
        if not steps:
            return []
        words = [(" step ", "dim"), (sparkline(steps, _TREND_CELLS), "cyan"), (f" {duration(steps[-1])}", "")]
        if rates:
            rate = f" {rates[-1]:,.0f}" if rates[-1] >= 99.5 else f" {rates[-1]:.3g}"
            words += [("  samples/s ", "dim"), (sparkline(rates, _TREND_CELLS), "cyan"), (rate, "")]
        return [line(*words)]

    def _memory_trend(self) -> list[Line]:
        """Return a line with the memory of the process that grows most, else of the largest; or none."""
        ranks = self._run.ranks
        known = [(rank.host_memory, rank.rank) for rank in ranks if rank.host_memory is not None]
        if not any(memory.course_bytes for memory, _ in known):
            return []
        memory, number = max(
            known, key=lambda each: (each[0].growth_bytes_per_second, each[0].resident_bytes)
        )
        course = sparkline(memory.course_bytes, _TREND_CELLS)
        whose = f"  rank {number}" if len(ranks) > 1 else ""
        return [line((" memory ", "dim"), (course, "cyan"), (f" {memory.words}", ""), (whose, "dim"))]

    @functools.cached_property
    def _legend(self) -> list[Line]:
        return legend(colours(self._run), self._inner)

    @functools.cached_property
    def _that_matter(self) -> set[int]:
        """The ranks that are always shown: those that a verdict names, that are slow, or stopped."""
        causes = [] if self._verdict is None else [self._verdict, *self._verdict.others]
        named = {each.rank for each in causes if each.rank >= 0}
        return {
            rank.rank for rank in self._run.ranks if rank.slow or rank.rank in named or rank.state == STOPPED
        }

    def _shown(self, others: int | None) -> Sequence[RankView]:
        """Return the ranks that are shown with so many of those that do not matter, in their order."""
        ranks, matter = self._run.ranks, self._that_matter
        if others is None:
            return ranks
        rest = [rank.rank for rank in ranks if rank.rank not in matter]
        # A run without a slow rank shows one all the same.
        chosen = matter | {*rest[: max(others, 0 if matter else 1)]}
        return [rank for rank in ranks if rank.rank in chosen]

    def _ranks(self, others: int | None) -> list[Line]:
        """Return a table of ranks, and how many are left out."""
        names = [name for name in _TABLE if name != "NODE" or self._frame.nodes]
        shown = self._shown(others)
        rows = [Row([_head(name) for name in names])]
        rows += [self._row(rank, names) for rank in shown]
        lines = columns(rows, [_TABLE[name] for name in names], self._inner, _GAP)
        hidden = len(self._run.ranks) - len(shown)
        if hidden:
            text = f"{_output.count(hidden, 'more rank')}, none of them slow"
            lines.append(cut(line((text, "dim")), self._inner.width))
        return lines

    def _row(self, rank: RankView, names: Sequence[str]) -> Row:
        by_phase = self._colours
        spent = [(*shade, rank.phase_seconds.get(name, 0.0)) for name, shade in by_phase.items()]
        mark = SELECTED if rank.rank == self._marked else ""
        wait, behind = rank.phase_seconds.get(WAIT), rank.behind_ratio
        cells: dict[str, Cell] = {
            "RANK": line((f"{mark}{'▶ ' if rank.slow else ''}{rank.rank}", "")),
            "NODE": line((rank.node, "")),
            "STATE": line((rank.state, "bold red" if rank.state in (STOPPED, STALLED) else "")),
            "STEPS": line((str(rank.steps), "")),
            "STEP": line((duration(rank.step_seconds) if rank.window else "-", "")),
            "WHAT A STEP IS SPENT ON": Bar(spent, self._step_seconds),
            "MOST OF IT": line((_most(rank), "")),
            "WAIT": line((milliseconds(wait) if wait else "-", "")),
            "VS PEERS": line((behind_text(behind), _level_of(behind)) if behind is not None else ("-", "")),
        }
        style = style_of(RankTarget(self._run.run, rank.rank), "bold red" if rank.slow else "")
        return Row([cells[name] for name in names], style)

    @functools.cached_property
    def _step_seconds(self) -> float:
        # Each of the rows needs it, and it is the longest of all ranks' steps.
        return self._run.step_seconds

    @functools.cached_property
    def _colours(self) -> dict[str, tuple[str, str]]:
        by_phase = colours(self._run)
        marks = letters(by_phase)
        return {name: (marks[name], colour) for name, colour in by_phase.items()}


def _head(name: str) -> Line:
    if name not in _ORDERS:
        return line((name, "bold dim"))
    return [Segment(name, style_of(OrderTarget(_ORDERS[name]), "bold dim"))]


def _most(rank: RankView) -> str:
    """Return the longest phase of a rank's step, and its share."""
    if not rank.phase_seconds or not rank.step_seconds:
        return "-"
    name, seconds = max(rank.phase_seconds.items(), key=lambda item: item[1])
    return f"{name_of(name)[:_MAX_NAME]} {seconds / rank.step_seconds:.0%}"


def _level_of(behind: float) -> str:
    return "red" if behind >= _FAR_BEHIND else "yellow" if behind >= _BEHIND else ""


def _paragraphs(width: int, *parts: Sequence[Words]) -> list[Line]:
    return [each for part in parts for each in wrapped(width, *part)]


def _verdict(card: VerdictCard | None) -> Sequence[Words]:
    if card is None:
        return [("? no verdict yet", "green")]
    if card.failure:
        return [("✗ ", "red"), (card.summary, "")]
    if not card.causes:
        return [("✓ " if card.is_healthy else "? ", "green"), (card.summary, "")]
    cause = card.causes[0]
    return [("✗ ", "red"), (cause.heading, "bold red"), (_why(cause), "red")]


def _also(cause: CauseCard) -> Sequence[Words]:
    return [("  also: ", ""), (cause.heading, "bold"), (_why(cause), "")]


def _why(cause: CauseCard) -> str:
    return f" · {cause.why}" if cause.why else ""
