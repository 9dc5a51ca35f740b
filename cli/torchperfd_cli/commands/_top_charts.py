"""The charts of ``top``: sparklines, legends, the account of a step, and the throughput of runs of late."""

import itertools
import string
import sys
from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import grpc
from rich.segment import Segment

from torchperfd.model.formatting import duration, milliseconds
from torchperfd.model.step_account import Account, PartKind, Row
from torchperfd.v1 import control_pb2, session_pb2
from torchperfd_cli.commands._top_lines import Bar, Canvas, Line, length, line
from torchperfd_daemon.views.model import WAIT, RunView, steady

_TICKS: Final = "▁▂▃▄▅▆▇█"
_KEPT: Final = 64
_ASK_EVERY_S: Final = 5.0
_TIMEOUT_S: Final = 2.0


def sparkline(values: Sequence[float], width: int) -> str:
    """Return the newest values as a line of blocks, from 0 to the largest; means, where they are many."""
    count = min(width, len(values))
    if count <= 0:
        return ""
    size, more = divmod(len(values), count)
    edges = [number * size + min(number, more) for number in range(count + 1)]
    means = [sum(values[first:end]) / (end - first) for first, end in itertools.pairwise(edges)]
    most = max(means)
    if most <= 0:
        return _TICKS[0] * len(means)
    return "".join(_TICKS[min(len(_TICKS) - 1, int(mean / most * len(_TICKS)))] for mean in means)


def seconds_of(column: bytes) -> list[float]:
    """Return a column of nanoseconds, as messages have it, in seconds."""
    values = array("q", column)
    if sys.byteorder == "big":
        values.byteswap()
    return [value / 1e9 for value in values]


def step_seconds(messages: Sequence[control_pb2.RankSteps]) -> dict[str, tuple[float, ...]]:
    """Return the newest step times of each run: those of its rank with the lowest number that has any."""
    found: dict[str, control_pb2.RankSteps] = {}
    for message in messages:
        run, rank = message.status.identity.run, message.status.identity.rank
        if message.count and (run not in found or rank < found[run].status.identity.rank):
            found[run] = message
    return {run: tuple(seconds_of(steady(message).duration_ns)) for run, message in found.items()}


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


def legend(colours: Mapping[str, str], canvas: Canvas, values: Mapping[str, str] | None = None) -> list[Line]:
    """Return which phase, or which part of a step, has which colour, or which letter.

    Args:
        values: What stands behind the names; nothing behind those that are not among it.
    """
    lines: list[Line] = []
    now: list[Segment] = []
    marks = letters(colours)
    for name, colour in colours.items():
        words = " ".join(filter(None, (name_of(name), (values or {}).get(name))))
        entry = line((marks[name], "" if canvas.plain else f"black on {colour}"), (f" {words}", "dim"))
        gap = line(("  ", "")) if now else []
        # A line never ends between a letter, its name and its value.
        if now and length(now) + length(gap) + length(entry) > canvas.width:
            lines.append(now)
            now, gap = [], []
        now = [*now, *gap, *entry]
    return [*lines, now]


def letters(names: Iterable[str]) -> dict[str, str]:
    """Return a letter for each phase, no two alike: the first one of its name that is free."""
    found: dict[str, str] = {"other": "."}
    for name in names:
        if name not in found:
            wanted = (*_NAMES.get(name, name), *string.ascii_uppercase, *string.digits)
            taken = found.values()
            found[name] = next((each for each in wanted if each.isalnum() and each not in taken), "?")
    return found


def account_lines(account: Account, canvas: Canvas) -> list[Line]:
    """Return the account of a step: its length, a bar of its parts, and their names with their times."""
    rows = {row.label: row for row in account.rows}
    shades = {label: _shade(row) for label, row in rows.items()}
    marks = letters(rows)
    values = {label: milliseconds(row.seconds) for label, row in rows.items()}
    bar = Bar([(marks[each], shades[each], rows[each].seconds) for each in rows], account.step_seconds)
    return [
        line((f"where a step of {duration(account.step_seconds)} goes, in ms", "bold dim")),
        bar.cells(canvas.width, plain=canvas.plain),
        *legend(shades, canvas, values),
    ]


def _shade(row: Row) -> str:
    if row.kind is PartKind.COMPUTING:
        return _COLOURS.get(row.label, _USERS[0])
    return _KINDS[row.kind] if row.kind is not None else "white"


def name_of(phase: str) -> str:
    return _NAMES.get(phase, phase)


def colours(run: RunView) -> dict[str, str]:
    """Return the colour of each phase there is, in the order of a step, waiting last."""
    users = [name for name in run.phases if name not in _COLOURS]
    own = {name: _USERS[position % len(_USERS)] for position, name in enumerate(users)}
    waits = [WAIT] if any(rank.phase_seconds.get(WAIT) for rank in run.ranks) else []
    return {name: own.get(name) or _COLOURS[name] for name in (*run.phases, *waits)}
