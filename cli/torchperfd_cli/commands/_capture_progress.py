"""The progress display of ``torchperfd capture``: a live table on a terminal, else lines."""

import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final

from torchperfd.document.text import fold_text, terminal_width, text_width
from torchperfd.v1 import control_pb2
from torchperfd.v1.contract import LONG_PAUSE_S, MIN_KERNELS_PER_LAUNCH
from torchperfd_cli.commands._output import can_redraw, emit, note, plain
from torchperfd_daemon.views.model import capture_state

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

_MAX_RANKS: Final = 20
_BAR_CELLS: Final = 24
_STYLES: Final = {"complete": "green", "partial": "yellow", "failed": "red"}


def watched(messages: Iterable[control_pb2.CaptureProgress]) -> Iterator[control_pb2.CaptureProgress]:
    """Yield the messages, and show them on stderr as they come."""
    if can_redraw():
        yield from _on_terminal(messages)
        return
    lines = Lines()
    for message in messages:
        lines.show(message)
        yield message


class Lines:
    """One line for each change of a capture's state."""

    def __init__(self) -> None:
        self._shown: dict[tuple[str, str], int] = {}

    def show(self, message: control_pb2.CaptureProgress) -> None:
        """Print the state if it has changed."""
        key = (message.run, message.capture_id)
        if self._shown.get(key) != message.state:
            self._shown[key] = message.state
            for line in _lines(message):
                _say(line)


def conclude(message: control_pb2.CaptureProgress) -> None:
    """Print a capture's files on stdout, and on stderr what to do with them.

    Files that a service keeps in its own directory are named by the capture's id and their name.
    """
    is_readable = os.access(message.directory, os.R_OK | os.X_OK)
    place = message.directory if is_readable else message.capture_id
    emit(plain(*(f"{place}/{rank.file}" for rank in message.ranks if rank.file and not rank.node)))
    elsewhere = Counter(rank.node for rank in message.ranks if rank.file and rank.node)
    for node, traces in elsewhere.items():
        command = f"torchperfd captures get {message.capture_id}"
        _say(f"{traces} trace(s) on node {node}: `{command}` there")
    for line in (*pause_warning(message), *_kernel_warning(message)):
        _say(line)
    if message.state == control_pb2.CAPTURE_STATE_COMPLETE:
        _say(f"complete: {steps_of(message)}; next:", _next_step(message))


def _say(line: str, command: str = "") -> None:
    """Print a message that fits the terminal; a command at its end stays on one line, to be copied."""
    width = terminal_width(sys.stderr)
    if not command:
        line = fold_text(line, width)
    elif width is None or text_width(f"{line} {command}") <= width:
        line = f"{line} {command}"
    else:
        line = f"{line}\n  {command}"
    note(line)


def pause_warning(message: control_pb2.CaptureProgress) -> Iterator[str]:
    """Yield a warning if training pauses for long when the capture ends, and what makes that shorter."""
    slowest = max(message.ranks, key=lambda rank: rank.pause_seconds, default=None)
    if slowest is None or slowest.pause_seconds <= LONG_PAUSE_S:
        return
    is_over = message.state != control_pb2.CAPTURE_STATE_ARMED
    pauses = "paused for" if is_over else "will pause for about"
    yield (
        f"warning: training {pauses} {slowest.pause_seconds:.1f} s at the capture's end"
        f" (rank {slowest.rank});"
        " fewer steps, or no shapes, stacks and memory, make that shorter"
    )


def _kernel_warning(message: control_pb2.CaptureProgress) -> Iterator[str]:
    worst = max(message.ranks, key=lambda rank: rank.launches - rank.kernels, default=None)
    if worst is not None and worst.kernels < MIN_KERNELS_PER_LAUNCH * worst.launches:
        yield (
            f"warning: the trace of rank {worst.rank} has {worst.launches:,} launches and only"
            f" {worst.kernels:,} kernels: does another profiler (nsys, ncu, DCGM) use CUPTI, or was a CUDA"
            " graph captured meanwhile?"
        )


def _next_step(message: control_pb2.CaptureProgress) -> str:
    if all(rank.file.endswith(".pickle") for rank in message.ranks):
        return "open a file at pytorch.org/memory_viz, which reads it in the browser"
    if not os.access(message.directory, os.R_OK | os.X_OK):
        # A service keeps it, and gives it to its user.
        return f"torchperfd analyze {message.capture_id}"
    return f"torchperfd analyze {message.directory}"


def steps_of(message: control_pb2.CaptureProgress) -> str:
    """Return which steps were agreed on, in words."""
    if message.steps == 1:
        return f"step {message.start_step}"
    return f"steps {message.start_step} to {message.start_step + message.steps - 1}"


def _lines(message: control_pb2.CaptureProgress) -> Iterator[str]:
    if message.state == control_pb2.CAPTURE_STATE_QUEUED:
        why = message.reason or f"queued behind another of run {message.run}"
        yield f"capture {message.capture_id}: {why}"
    elif message.state == control_pb2.CAPTURE_STATE_PREPARING:
        yield f"capture {message.capture_id}: preparing {len(message.ranks)} rank(s)"
    elif message.state == control_pb2.CAPTURE_STATE_ARMED:
        yield f"agreed on {steps_of(message)}"
        yield from pause_warning(message)


def _on_terminal(
    messages: Iterable[control_pb2.CaptureProgress],
) -> Iterator[control_pb2.CaptureProgress]:
    from rich.console import Console
    from rich.live import Live

    # Transient: the caller prints the outcome, which the table would only repeat.
    table = Table()
    with Live(console=Console(stderr=True, highlight=False), auto_refresh=False, transient=True) as live:
        for message in messages:
            table.show(message)
            live.update(table.render(), refresh=True)
            yield message


class Table:
    """A line per capture, and below it one per rank."""

    def __init__(self) -> None:
        self._captures: dict[tuple[str, str], control_pb2.CaptureProgress] = {}
        self._first_seen: dict[tuple[str, int], int] = {}

    def show(self, message: control_pb2.CaptureProgress) -> None:
        """Store a change."""
        self._captures[message.run, message.capture_id] = message
        if message.state != control_pb2.CAPTURE_STATE_ARMED:
            return
        for rank in message.ranks:
            self._first_seen.setdefault((message.capture_id, rank.rank), rank.next_step)

    def render(self) -> "RenderableType":
        """Return all of it as rich shows it."""
        from rich.console import Group

        return Group(*(line for message in self._captures.values() for line in self._capture(message)))

    def _capture(self, message: control_pb2.CaptureProgress) -> "Iterator[RenderableType]":
        from rich.table import Table as Grid
        from rich.text import Text

        agreed = f", {steps_of(message)}" if message.state == control_pb2.CAPTURE_STATE_ARMED else ""
        is_queued = message.state == control_pb2.CAPTURE_STATE_QUEUED
        why = f", {message.reason}" if is_queued and message.reason else ""
        state = capture_state(message.state)
        title = f"capture {message.capture_id} of run {message.run}: {state}{agreed}{why}"
        yield Text(title, no_wrap=True, overflow="ellipsis")
        # Failed ranks come first.
        ranks = sorted(message.ranks, key=lambda rank: (not rank.reason, rank.rank))
        names = [f"  rank {rank.rank}" for rank in ranks[:_MAX_RANKS]]
        grid = Grid.grid(padding=(0, 1), expand=True)
        grid.add_column(min_width=max(map(len, names), default=0))
        grid.add_column(min_width=_BAR_CELLS)
        # A long reason is cut rather than the rank's name.
        grid.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
        for name, rank in zip(names, ranks, strict=False):
            grid.add_row(Text(name), self._bar(message, rank), self._words(message, rank))
        yield grid
        if message.state == control_pb2.CAPTURE_STATE_ARMED:
            yield from (Text(f"  {line}") for line in pause_warning(message))
        rest = Counter(capture_state(rank.state) for rank in ranks[_MAX_RANKS:])
        if rest:
            counts = ", ".join(f"{count} {state}" for state, count in rest.most_common())
            yield Text(f"  and {rest.total()} more ranks: {counts}")

    def _bar(self, message: control_pb2.CaptureProgress, rank: control_pb2.CaptureRank) -> "RenderableType":
        from rich.progress_bar import ProgressBar

        state = capture_state(rank.state)
        style = _STYLES.get(state, "bar.complete")
        if state == "complete":
            return ProgressBar(1, 1, width=_BAR_CELLS, finished_style=style)
        if state != "armed":
            return ProgressBar(1, 0, width=_BAR_CELLS)
        first = self._first_seen.get((message.capture_id, rank.rank), rank.next_step)
        end = message.start_step + message.steps
        return ProgressBar(
            max(1, end - first), min(rank.next_step, end) - first, width=_BAR_CELLS, complete_style=style
        )

    def _words(self, message: control_pb2.CaptureProgress, rank: control_pb2.CaptureRank) -> "Text":
        from rich.text import Text

        state = capture_state(rank.state)
        if message.state == control_pb2.CAPTURE_STATE_QUEUED:
            return Text("queued")
        if state == "complete":
            return Text(f"{rank.bytes / 1e6:.1f} MB", style=_STYLES[state])
        if state == "failed":
            return Text(rank.reason, style=_STYLES[state])
        if state != "armed":
            return Text(state)
        before = message.start_step - rank.next_step
        if before > 0:
            return Text(f"starts in {before:,} step{'s' if before > 1 else ''}")
        if -before < message.steps:
            return Text(f"recording step {1 - before:,} of {message.steps:,}")
        return Text("writing its trace")
