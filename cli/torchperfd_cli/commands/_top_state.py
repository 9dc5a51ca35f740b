"""The state of ``top``: the data of one moment, and what a person has chosen: order, filter, rank, page.

Pure.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final

from torchperfd.v1 import control_pb2
from torchperfd_cli.commands._top_lines import OrderTarget, RankTarget, Target
from torchperfd_daemon.views.model import WAIT, RankView, RunView, gpu_order

UP: Final = "up"
DOWN: Final = "down"
PAGE_UP: Final = "pageup"
PAGE_DOWN: Final = "pagedown"
WHEEL_UP: Final = "wheel up"
WHEEL_DOWN: Final = "wheel down"
ENTER: Final = "enter"
ESCAPE: Final = "escape"
BACKSPACE: Final = "backspace"

_CPU: Final = "node_cpu_utilization_ratio"
_AVAILABLE: Final = "node_memory_available_bytes"
_TOTAL: Final = "node_memory_total_bytes"
_BUSY: Final = "gpu_utilization_ratio"
_USED: Final = "gpu_memory_used_bytes"
_ROOM: Final = "gpu_memory_total_bytes"
_POWER: Final = "gpu_power_watts"
_HEAT: Final = "gpu_temperature_celsius"
_INFO: Final = "gpu_info"

READINGS: Final = (_CPU, _AVAILABLE, _TOTAL, _BUSY, _USED, _ROOM, _POWER, _HEAT, _INFO)
"""The metrics to request."""


@dataclass(frozen=True, slots=True)
class GpuView:
    """One GPU or MIG instance; values that it does not provide are None."""

    gpu: str
    model: str
    busy: float | None
    memory_used: float | None
    memory_total: float | None
    watts: float | None
    celsius: float | None


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node. Ratios are 0 to 1, memory is bytes; what is not known is None."""

    cpu: float | None
    memory_used: float | None
    memory_total: float | None
    gpus: tuple[GpuView, ...]


def node(readings: Iterable[control_pb2.Reading]) -> NodeView:
    """Return a node's values."""
    own: dict[str, float] = {}
    gpus: dict[str, dict[str, float]] = {}
    models: dict[str, str] = {}
    for reading in readings:
        gpu = reading.labels.get("gpu")
        if gpu is None:
            own[reading.name] = reading.value
        elif reading.name == _INFO:
            models[gpu] = reading.labels["model"]
        elif reading.labels.get("sensor", "gpu") == "gpu":
            gpus.setdefault(gpu, {})[reading.name] = reading.value
    total, available = own.get(_TOTAL), own.get(_AVAILABLE)
    return NodeView(
        own.get(_CPU),
        total - available if total is not None and available is not None else None,
        total,
        tuple(
            GpuView(
                gpu,
                models.get(gpu, ""),
                values.get(_BUSY),
                values.get(_USED),
                values.get(_ROOM),
                values.get(_POWER),
                values.get(_HEAT),
            )
            for gpu, values in sorted(gpus.items(), key=lambda item: gpu_order(item[0]))
        ),
    )


@dataclass(frozen=True, slots=True)
class Frame:
    """The data of one moment.

    Attributes:
        clock: The time of day, for people.
        problem: Why the data is stale, or which daemons do not answer; empty without a problem.
        nodes: How many have answered for the fleet; 0 where only this one was asked.
        step_seconds: The newest step times of each run, oldest first.
        samples_per_second: The newest throughput of each run, oldest first; without runs where it is unknown.
        ages: Seconds since the last step of each run ended; without runs that have made none.
        steps: The newest steps of each rank.
    """

    node: str
    clock: str
    view: NodeView
    runs: Sequence[RunView]
    verdicts: Mapping[str, control_pb2.Verdict] = field(default_factory=dict)
    problem: str = ""
    nodes: int = 0
    step_seconds: Mapping[str, Sequence[float]] = field(default_factory=dict)
    samples_per_second: Mapping[str, Sequence[float]] = field(default_factory=dict)
    ages: Mapping[str, float] = field(default_factory=dict)
    steps: Sequence[control_pb2.RankSteps] = ()


_PAGE_LINES: Final = 10
_MOVES: Final = {
    UP: -1,
    DOWN: 1,
    PAGE_UP: -_PAGE_LINES,
    PAGE_DOWN: _PAGE_LINES,
    WHEEL_UP: -3,
    WHEEL_DOWN: 3,
}
"""Lines of a text by key; in a list, the wheel moves by one rank."""


class Page(Enum):
    """What fills the screen."""

    RUNS = "runs"
    RANK = "rank"
    TEXT = "text"
    HELP = "help"


class Action(Enum):
    """What a key asks of the daemon or of ``top`` itself."""

    NONE = "none"
    QUIT = "quit"
    CAPTURE = "capture"
    STACKS = "stacks"
    MOUSE = "mouse"


_ORDERS: Final[tuple[tuple[str, Callable[[RankView], float]], ...]] = (
    ("rank", lambda rank: rank.rank),
    ("step", lambda rank: -rank.step_seconds),
    ("own work", lambda rank: -rank.own_seconds),
    ("wait", lambda rank: -rank.phase_seconds.get(WAIT, 0.0)),
)


@dataclass(slots=True)
class TopState:
    """What a person has chosen.

    Attributes:
        order: Position in the list of orders.
        pattern: Runs, nodes and states that contain it are shown; empty for all.
        is_typing: Whether keys go into the pattern.
        is_paused: Whether the picture stands still.
        has_mouse: Whether clicks are events, rather than the terminal's selection of text.
        selected: Run and rank; None for none.
        page: What fills the screen.
        offset: The first line that is shown of a page longer than the screen.
        text: The lines of the text page.
        message: What to say about the last action; empty for nothing.
    """

    order: int = 0
    pattern: str = ""
    is_typing: bool = False
    is_paused: bool = False
    has_mouse: bool = True
    selected: tuple[str, int] | None = None
    page: Page = Page.RUNS
    offset: int = 0
    text: list[str] = field(default_factory=list)
    message: str = ""

    @property
    def order_name(self) -> str:
        return _ORDERS[self.order][0]

    def arrange(self, frame: Frame) -> Frame:
        """Return a frame with the runs and ranks that the pattern leaves, in the chosen order."""
        return replace(frame, runs=[run for run in map(self._arranged, frame.runs) if run.ranks])

    def press(self, key: str, frame: Frame) -> Action:
        """Take a key; return what it asks for.

        Args:
            frame: What is on the screen, arranged.
        """
        self.message = ""
        if self.is_typing:
            self._type(key)
        elif key in ("q", "Q"):
            return Action.QUIT
        elif key in _MOVES:
            self._move(key, frame)
        elif key == "m":
            self.has_mouse = not self.has_mouse
            self.message = "" if self.has_mouse else "mouse off, so that it selects text; m switches it on"
            return Action.MOUSE
        elif key in ("k", "c") and self.run(frame):
            return Action.STACKS if key == "k" else Action.CAPTURE
        else:
            self._choose(key, frame)
        return Action.NONE

    def click(self, target: Target | None) -> None:
        """Take a click: on a rank, which is opened, or on the head of a column; on other pages it goes back.

        Args:
            target: What was clicked; None for nothing in particular.
        """
        self.message = ""
        if self.page is not Page.RUNS:
            self.page = Page.RUNS
        elif isinstance(target, RankTarget):
            self.selected = (target.run, target.rank)
            self.page, self.offset = Page.RANK, 0
        elif isinstance(target, OrderTarget):
            self.order = next(n for n, (name, _) in enumerate(_ORDERS) if name == target.order)

    def run(self, frame: Frame) -> str:
        """Return the run that an action is about: the selected rank's, else the first; empty for none."""
        if self.selected is not None:
            return self.selected[0]
        return frame.runs[0].run if frame.runs else ""

    def show_text(self, text: str) -> None:
        self.page, self.offset, self.text = Page.TEXT, 0, text.splitlines()

    def _choose(self, key: str, frame: Frame) -> None:
        if key in ("?", "h"):
            self.page = Page.RUNS if self.page is Page.HELP else Page.HELP
        elif key == ESCAPE:
            self._back()
        elif key == ENTER:
            ranks = _ranks(frame)
            if self.selected is None and ranks:
                self.selected = _named(frame) or ranks[0]
            self.page, self.offset = (Page.RANK if self.selected else Page.RUNS), 0
        elif key == "s":
            self.order = (self.order + 1) % len(_ORDERS)
        elif key in ("p", " "):
            self.is_paused = not self.is_paused
        elif key == "/":
            self.is_typing = True

    def _type(self, key: str) -> None:
        if key in (ENTER, ESCAPE):
            self.is_typing = False
            self.pattern = self.pattern if key == ENTER else ""
        elif key == BACKSPACE:
            self.pattern = self.pattern[:-1]
        elif len(key) == 1 and key.isprintable():
            self.pattern += key

    def _back(self) -> None:
        if self.page is not Page.RUNS:
            self.page = Page.RUNS
        elif self.selected is not None:
            self.selected = None
        else:
            self.pattern = ""

    def _move(self, key: str, frame: Frame) -> None:
        lines = _MOVES[key]
        if self.page is Page.TEXT:
            self.offset = max(0, min(self.offset + lines, len(self.text) - 1))
            return
        ranks = _ranks(frame)
        if not ranks or self.page is Page.HELP:
            return
        if key in (WHEEL_UP, WHEEL_DOWN):
            lines //= abs(lines)
        here = ranks.index(self.selected) if self.selected in ranks else (-1 if lines > 0 else len(ranks))
        self.selected = ranks[max(0, min(here + lines, len(ranks) - 1))]

    def _arranged(self, run: RunView) -> RunView:
        ranks = sorted(run.ranks, key=_ORDERS[self.order][1])
        if self.pattern.lower() not in run.run.lower():
            ranks = [rank for rank in ranks if self._matches(rank)]
        return replace(run, ranks=tuple(ranks))

    def _matches(self, rank: RankView) -> bool:
        words = (rank.node.lower(), rank.state, str(rank.rank), rank.coordinates.lower())
        return any(self.pattern.lower() in word for word in words)


def _ranks(frame: Frame) -> list[tuple[str, int]]:
    return [(run.run, rank.rank) for run in frame.runs for rank in run.ranks]


def _named(frame: Frame) -> tuple[str, int] | None:
    """Return the rank that the first verdict names; None if it names none that is shown."""
    for run in frame.runs:
        verdict = frame.verdicts.get(run.run)
        if verdict is not None and (run.run, verdict.rank) in _ranks(frame):
            return run.run, verdict.rank
    return None
