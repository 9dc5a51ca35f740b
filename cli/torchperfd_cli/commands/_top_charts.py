"""The charts of ``top``: bars with legends, sparklines, and the throughput of runs over the last half minute.

Bars are colours on a terminal that has them, letters elsewhere.
"""

import string
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import grpc
import numpy as np
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from torchperfd.model.formatting import duration, milliseconds
from torchperfd.model.step_account import Account, PartKind, Row
from torchperfd.v1 import control_pb2, session_pb2
from torchperfd_daemon.views.model import WAIT, RunView, steady

_TICKS: Final = "▁▂▃▄▅▆▇█"
_KEPT: Final = 64
_ASK_EVERY_S: Final = 5.0
_TIMEOUT_S: Final = 2.0


def sparkline(values: Sequence[float], width: int) -> str:
    """Return the newest values as a line of blocks, from 0 to the largest; means, where they are many."""
    if not len(values) or width <= 0:
        return ""
    parts = np.array_split(np.asarray(values, dtype=float), min(width, len(values)))
    means = [float(part.mean()) for part in parts]
    most = max(means)
    if most <= 0:
        return _TICKS[0] * len(means)
    return "".join(_TICKS[min(len(_TICKS) - 1, int(mean / most * len(_TICKS)))] for mean in means)


def step_seconds(messages: Sequence[control_pb2.RankSteps]) -> dict[str, tuple[float, ...]]:
    """Return the newest step times of each run: those of its rank with the lowest number that has any."""
    found: dict[str, tuple[int, tuple[float, ...]]] = {}
    for message in messages:
        identity = message.status.identity
        if message.count and identity.rank < found.get(identity.run, (1 << 32, ()))[0]:
            times = np.frombuffer(steady(message).duration_ns, "<i8") / 1e9
            found[identity.run] = identity.rank, tuple(times.tolist())
    return {run: times for run, (_, times) in found.items()}


def ages(messages: Sequence[control_pb2.RankSteps], now: float) -> dict[str, float]:
    """Return the seconds since the newest step of each run.

    Args:
        now: Unix seconds.
    """
    newest: dict[str, float] = {}
    for message in messages:
        status = message.status
        run, ended = status.identity.run, status.last_step_unix_seconds
        if ended and ended > newest.get(run, 0.0):
            newest[run] = ended
    return {run: max(0.0, now - ended) for run, ended in newest.items()}


class Throughput:
    """The samples per second of runs, from the samples in a step and its newest duration."""

    def __init__(self) -> None:
        self._per_step: dict[str, float] = {}
        self._rates: dict[str, deque[float]] = {}
        self._asked_at = 0.0

    def update(self, daemon: Any, runs: Sequence[RunView], now: float) -> None:
        """Add the present rates; ask the daemon for the samples of a step from time to time.

        Args:
            now: Monotonic seconds.
        """
        if not self._asked_at or now - self._asked_at >= _ASK_EVERY_S:
            self._asked_at = now
            for run in runs:
                self._per_step[run.run] = _samples_per_step(daemon, run.run)
        for run in runs:
            samples = self._per_step.get(run.run, 0.0)
            if samples and run.step_seconds:
                self._rates.setdefault(run.run, deque(maxlen=_KEPT)).append(samples / run.step_seconds)

    def rates(self) -> dict[str, tuple[float, ...]]:
        """Return the newest rates of each run whose samples are known, oldest first."""
        return {run: tuple(rates) for run, rates in self._rates.items()}


def _samples_per_step(daemon: Any, run: str) -> float:
    """Return the samples that all ranks on this node train on in a step; 0 if unknown."""
    try:
        ranks = daemon.GetRun(control_pb2.GetRunRequest(run=run), timeout=_TIMEOUT_S).ranks
    except grpc.RpcError:
        return 0.0
    per_step: list[float] = [
        kind.samples / kind.steps
        for rank in ranks
        for kind in rank.account.kinds
        if kind.kind == session_pb2.STEP_KIND_TRAIN and kind.steps
    ]
    return sum(per_step)


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
_KINDS: Final[Mapping[PartKind, str]] = {
    PartKind.LOSS: "red",
    PartKind.DATA: "yellow",
    PartKind.LATE_RANK: "bright_red",
    PartKind.UNEVEN_WORK: "bright_black",
    PartKind.EXCHANGE: "cyan",
    PartKind.LOCK: "bright_yellow",
    PartKind.UNNAMED: "white",
}
"""The colours of parts of a step that are not the work of a phase."""
_USERS: Final = ("bright_cyan", "bright_magenta", "bright_blue")
_NAMES: Final[Mapping[str, str]] = {WAIT: "wait"}
_MIN_WIDTH: Final = 8
LEVEL: Final = "#"
"""The letter of a bar with one part, which is shown only where there are no colours."""


class Bar:
    """Parts of a whole as a bar as wide as its cell; each part is a letter, a colour and its size."""

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
            if end > drawn:
                yield _part(name, colour, end - drawn, plain=plain)
            drawn = max(drawn, end)
        yield Segment(("·" if plain else "─") * (width - drawn), None if plain else Style.parse("grey30"))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(_MIN_WIDTH, self._width or options.max_width)


def _part(name: str, colour: str, width: int, *, plain: bool) -> Segment:
    if plain:
        return Segment(name * width)
    if name == LEVEL:
        # Lines, since filled cells would merge with those of the rows above and below.
        return Segment("━" * width, Style.parse(colour))
    # The letter is there with colours too, because eight colours are hard to distinguish.
    return Segment(name.ljust(width), Style.parse(f"black on {colour}"))


class Legend:
    """Which phase, or which part of a step, has which colour, or which letter.

    Args:
        values: What stands behind the names; none for those that are not among it.
    """

    def __init__(self, colours: Mapping[str, str], values: Mapping[str, str] | None = None) -> None:
        self._colours, self._values = colours, values or {}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line = Text()
        marks = letters(self._colours)
        for name, colour in self._colours.items():
            words = " ".join(filter(None, (_NAMES.get(name, name), self._values.get(name))))
            entry = Text.assemble(
                (marks[name], "" if _plain(console) else f"black on {colour}"), (f"\u00a0{words}  ", "dim")
            )
            # A line never ends between a letter, its name and its value.
            if line and line.cell_len + entry.cell_len - len("  ") > options.max_width:
                yield line
                line = Text()
            line.append_text(entry)
        yield line


def _plain(console: Console) -> bool:
    return console.no_color or console.color_system is None


def letters(names: Iterable[str]) -> dict[str, str]:
    """Return a letter for each phase, no two alike: the first one of its name that is free."""
    found: dict[str, str] = {"other": "."}
    for name in names:
        if name not in found:
            wanted = (*_NAMES.get(name, name), *string.ascii_uppercase, *string.digits)
            taken = found.values()
            found[name] = next((each for each in wanted if each.isalnum() and each not in taken), "?")
    return found


def account_bar(account: Account) -> list[RenderableType]:
    """Return the account of a step: its length, a bar of its parts, and their names with their times."""
    rows = {row.label: row for row in account.rows}
    shades = {label: _shade(row) for label, row in rows.items()}
    marks = letters(rows)
    values = {label: milliseconds(row.seconds) for label, row in rows.items()}
    bar = Table.grid(expand=True)
    bar.add_row(Bar([(marks[each], shades[each], rows[each].seconds) for each in rows], account.step_seconds))
    title = Text(f"where a step of {duration(account.step_seconds)} goes, in ms", style="bold dim")
    return [title, bar, Legend(shades, values)]


def _shade(row: Row) -> str:
    if row.kind is PartKind.COMPUTING:
        return _COLOURS.get(row.label, _USERS[0])
    return _KINDS[row.kind] if row.kind is not None else "white"


def name_of(phase: str) -> str:
    """Return what people read for a phase."""
    return _NAMES.get(phase, phase)


def colours(run: RunView) -> dict[str, str]:
    """Return the colour of each phase there is, in the order of a step, waiting last."""
    users = [name for name in run.phases if name not in _COLOURS]
    own = {name: _USERS[position % len(_USERS)] for position, name in enumerate(users)}
    waits = [WAIT] if any(rank.phase_seconds.get(WAIT) for rank in run.ranks) else []
    return {name: own.get(name) or _COLOURS[name] for name in (*run.phases, *waits)}
