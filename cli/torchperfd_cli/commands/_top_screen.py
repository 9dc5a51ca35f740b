"""The screen of ``top``: one frame of node, runs, ranks and verdicts, or a page besides these."""

from collections.abc import Sequence
from typing import Final

from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment

from torchperfd.model.formatting import duration, milliseconds
from torchperfd.v1 import control_pb2
from torchperfd_cli.commands import _output
from torchperfd_cli.commands._output import NO_RUNS
from torchperfd_cli.commands._top_charts import colours, letters, name_of, seconds_of, sparkline
from torchperfd_cli.commands._top_lines import (
    LEVEL,
    Bar,
    Canvas,
    Cell,
    Column,
    Line,
    Row,
    columns,
    cut,
    fit,
    is_plain,
    length,
    line,
    wrapped,
)
from torchperfd_cli.commands._top_runs import SELECTED, drawn_runs, panels
from torchperfd_cli.commands._top_state import Frame, GpuView, NodeView, Page, TopState
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
_BARS: Final = (
    "Bars: each rank's step by phase, on a common scale. ▶ marks a rank that the others wait for.",
    "WAIT is the wait for other ranks. VS PEERS compares a rank's own work with its peers' median.",
)


def help_page(canvas: Canvas) -> list[Line]:
    """Return the keys and what they do."""
    named = max(len(keys) for keys, _ in _HELP) + 1
    lines: list[Line] = []
    for keys, words in _HELP:
        first, *more = wrapped(canvas.width - named - 2, (words, ""))
        lines.append([*fit(line((f" {keys}", "bold")), named + 2), *first])
        lines += [[Segment(" " * (named + 2)), *each] for each in more]
    lines.append([])
    lines += [[Segment(" "), *each] for words in _BARS for each in wrapped(canvas.width - 2, (words, ""))]
    return lines


def rank_page(frame: Frame, run_name: str, number: int, canvas: Canvas) -> list[Line]:
    """Return one rank in detail: its state, its newest steps, and its phases with percentiles."""
    run = next((each for each in frame.runs if each.run == run_name), None)
    rank = next((each for each in run.ranks if each.rank == number), None) if run is not None else None
    message = next((each for each in frame.steps if _is(each, run_name, number)), None)
    if run is None or rank is None or message is None:
        return [line((f" rank {number} of {run_name} is not there any more", "dim"))]
    stalled = f", no step for {rank.stalled_seconds:.0f} s" if rank.stalled_seconds else ""
    facts = (
        ("rank", f"{number} of {run.world_size} in {run.run}"),
        ("process", f"{rank.pid} on {rank.node}" + (f", {rank.coordinates}" if rank.coordinates else "")),
        ("state", rank.state + stalled),
        ("steps", f"{rank.steps:,}, the newest {_age(frame, run_name)}"),
        ("peers", _peers(rank)),
    )
    rows = [Row([line((f" {name}", "dim")), line((words, ""))]) for name, words in facts]
    head = columns(rows, [Column(), Column(least=1)], canvas, 2)
    message = steady(message)
    times = seconds_of(message.duration_ns)
    if not times:
        return head
    mean = sum(times) / len(times)
    p50, p95 = _percentiles(times)
    words = f"  step {duration(mean)}, p50 {duration(p50)}, p95 {duration(p95)}"
    trend = line((" ", ""), (sparkline(times, _TREND_CELLS), "cyan"), (words, ""))
    return [*head, [], cut(trend, canvas.width), [], *_phases(run, message, mean, canvas)]


_PHASE_HEADS: Final = ("PHASE", "MEAN MS", "%", "P50", "P95", "SHARE OF THE STEP")
_PHASE_COLUMNS: Final = (
    Column(least=8),
    *(Column(is_right=True) for _ in _PHASE_HEADS[1:-1]),
    Column(least=8, grows=True, dropped=1),
)


def _phases(run: RunView, message: control_pb2.RankSteps, step: float, canvas: Canvas) -> list[Line]:
    by_phase = colours(run)
    marks = letters(by_phase)
    found = {column.phase: seconds_of(column.ns) for column in message.phases if len(column.ns)}
    means = {name: sum(times) / len(times) for name, times in found.items()}
    rows = [Row([line((name, "bold dim")) for name in _PHASE_HEADS])]
    for name, mean in sorted(means.items(), key=lambda item: -item[1]):
        if not mean:
            continue
        p50, p95 = _percentiles(found[name])
        share = f"{mean / step:.0%}" if step else "-"
        words = (name_of(name), milliseconds(mean), share, milliseconds(p50), milliseconds(p95))
        bar = Bar([(marks.get(name, "#"), by_phase.get(name, "white"), mean)], step)
        rows.append(Row([*(line((each, "")) for each in words), bar]))
    within = Canvas(canvas.width - 2, canvas.plain)
    return [[Segment(" "), *each] for each in columns(rows, _PHASE_COLUMNS, within, 2)]


def _percentiles(times: Sequence[float]) -> tuple[float, float]:
    """Return the median and the 95th percentile, interpolated between the two nearest times."""
    ordered = sorted(times)
    found = []
    for share in (0.5, 0.95):
        place = share * (len(ordered) - 1)
        below = int(place)
        above = min(below + 1, len(ordered) - 1)
        found.append(ordered[below] + (place - below) * (ordered[above] - ordered[below]))
    return found[0], found[1]


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
_LEAST_BAR: Final = 8
_MAX_GPUS: Final = 8
_FULL: Final = 0.9
_NEARLY_FULL: Final = 0.75
"""From these shares on, a bar of memory or of CPUs is red, and yellow."""
_NODE_COLUMNS: Final = (
    Column(),
    Column(least=_LEAST_BAR),
    Column(),
    Column(),
    Column(least=_LEAST_BAR),
    Column(),
    # On a narrow terminal, facts are cut off and bars become short, numbers are kept.
    Column(least=0),
)
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


class Drawing:
    """A frame, laid out for the width of what it is drawn on.

    Args:
        height: Number of lines available. Verdicts come first, then the ranks that they name, then the rest;
            hidden rows are counted. None for no limit.
        state: What a person has chosen; None where no key can be pressed.
    """

    def __init__(self, frame: Frame, height: int | None = None, state: TopState | None = None) -> None:
        self._frame, self._height, self._state = frame, height, state

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for each in self.lines(Canvas(options.max_width, is_plain(console))):
            yield from each
            yield Segment.line()

    def lines(self, canvas: Canvas) -> list[Line]:
        """Return the lines: with a state exactly as many as there are, the keys in the last one."""
        state, height = self._state, self._height
        frame = self._frame if state is None else state.arrange(self._frame)
        head = [_head(self._frame, state, canvas)]
        if frame.problem:
            head += wrapped(canvas.width, (f"! {frame.problem}", "bold red"))
        if state is None or height is None:
            return [*head, *self._body(frame, None if height is None else height - len(head), canvas)]
        room = max(1, height - len(head) - 1)
        body = self._page(frame, state, room, canvas)[:room]
        return [*head, *body, *([] for _ in range(room - len(body))), _foot(state, canvas)][:height]

    def _page(self, frame: Frame, state: TopState, room: int, canvas: Canvas) -> list[Line]:
        """Return what fills the screen, from its first line that is shown on."""
        if state.page is Page.HELP:
            return help_page(canvas)
        if state.page is Page.TEXT:
            return [each for text in state.text for each in wrapped(canvas.width, (text, ""))][state.offset :]
        if state.page is Page.RANK and state.selected is not None:
            return rank_page(frame, *state.selected, canvas)
        if state.selected is None:
            return self._body(frame, room, canvas)
        lines = panels(drawn_runs(frame, canvas, state.selected), None, canvas).lines
        # With the selected rank in the middle.
        at = next((n for n, each in enumerate(lines) if any(SELECTED in part.text for part in each)), 0)
        return lines[max(0, min(at - room // 2, len(lines) - room)) :]

    def _body(self, frame: Frame, room: int | None, canvas: Canvas) -> list[Line]:
        """Return the node and the runs in so many lines; None for no limit."""
        node = _node(frame.view, canvas)
        if not frame.runs:
            words = f" {NO_RUNS}" if not self._frame.runs else " no run matches the filter"
            return [*node, *wrapped(canvas.width, (words, "dim"))]
        runs = drawn_runs(frame, canvas)
        if room is None:
            return [*node, *panels(runs, None, canvas).lines]
        # The node is shortened first, so that verdicts and the ranks that they name fit.
        for shown in (node, _node(frame.view, canvas, short=True)):
            found = panels(runs, room - len(shown), canvas)
            if found.complete:
                return [*shown, *found.lines]
        return panels(runs, room, canvas).lines


def _foot(state: TopState, canvas: Canvas) -> Line:
    """Return the last line: the filter that is typed, else what there is to say, else the keys."""
    if state.is_typing:
        return cut(line((f" filter: {state.pattern}▏", "bold")), canvas.width)
    if state.message:
        return cut(line((f" {state.message}", "bold")), canvas.width)
    words = [part for key, words in _KEYS for part in ((key, "reverse"), (f" {words} ", "dim"))]
    return cut(line(*words), canvas.width)


def _head(frame: Frame, state: TopState | None, canvas: Canvas) -> Line:
    ranks = sum(len(run.ranks) for run in frame.runs)
    what = f"{_output.count(len(frame.runs), 'run')}, {_output.count(ranks, 'rank')}"
    if frame.nodes:
        what += f" on {_output.count(frame.nodes, 'node')}"
    left = line((" torchperfd ", "bold reverse"), (f" {frame.node} · {what}", ""))
    right = line((_chosen(state), "yellow"), (frame.clock, "dim"))
    return cut([*fit(left, max(0, canvas.width - length(right))), *right], canvas.width)


def _chosen(state: TopState | None) -> str:
    """Return what differs from the usual picture, for the head."""
    if state is None:
        return ""
    parts = ["paused" if state.is_paused else "", f"filter {state.pattern}" if state.pattern else ""]
    parts.append(f"by {state.order_name}" if state.order else "")
    return "".join(f"{part}  " for part in parts if part)


def _node(view: NodeView, canvas: Canvas, *, short: bool = False) -> list[Line]:
    rows: list[Row] = []
    if view.cpu is not None or view.memory_total:
        level = _level(view.cpu, 1.0, rising=True)
        rows.append(_use(" CPU", level, view.cpu, view.memory_used, view.memory_total))
    if short and len(view.gpus) > 1:
        rows.append(_all_gpus(view.gpus))
        return columns(rows, _NODE_COLUMNS, canvas)
    rows += map(_gpu, view.gpus[:_MAX_GPUS])
    lines = columns(rows, _NODE_COLUMNS, canvas)
    rest = len(view.gpus) - _MAX_GPUS
    if rest > 0:
        lines.append(line((f" {rest} more GPUs", "")))
    return lines or [line((" nothing is measured of this node yet", "dim"))]


def _use(
    name: str, busy: Cell, ratio: float | None, used: float | None, total: float | None, facts: str = ""
) -> Row:
    """Return how far something is used, and its memory."""
    percent = f"{ratio:4.0%}" if ratio is not None else "   -"
    size = f"{used / _GIB:.1f} of {total / _GIB:.0f} GiB" if used is not None and total else "-"
    words = (line((percent, "")), line((" memory", "")), _level(used, total), line((size, "")))
    return Row([line((name, "")), busy, *words, line((facts, "dim"))])


def _gpu(gpu: GpuView) -> Row:
    facts = [
        f"{gpu.watts:4.0f} W" if gpu.watts is not None else "",
        f"{gpu.celsius:3.0f} °C" if gpu.celsius is not None else "",
        gpu.model,
    ]
    level = _level(gpu.busy, 1.0)
    words = " ".join(filter(None, facts))
    return _use(f" GPU {gpu.gpu}", level, gpu.busy, gpu.memory_used, gpu.memory_total, words)


def _all_gpus(gpus: Sequence[GpuView]) -> Row:
    """Return one line for all GPUs: how busy they are on average, and the fullest one's memory."""
    busy = [gpu.busy for gpu in gpus if gpu.busy is not None]
    mean = sum(busy) / len(busy) if busy else None
    fullest = max(gpus, key=lambda gpu: (gpu.memory_used or 0.0) / (gpu.memory_total or 1.0))
    level = _level(mean, 1.0)
    return _use(f" {len(gpus)} GPUs", level, mean, fullest.memory_used, fullest.memory_total)


def _level(value: float | None, whole: float | None, *, rising: bool = False) -> Cell:
    """Return a bar, coloured by thresholds if a high level is a warning: of memory, and with ``rising``."""
    if value is None or not whole:
        return line(("-".rjust(_BAR_WIDTH), ""))
    part = value / whole if whole > 1 or rising else 0.0
    colour = "red" if part >= _FULL else "yellow" if part >= _NEARLY_FULL else "green"
    return Bar([(LEVEL, colour, value)], whole, _BAR_WIDTH)
