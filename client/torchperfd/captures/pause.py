"""The pause at a capture's end: how long it will be, before the capture, and how long it was.

Stopping and writing a trace hold the interpreter's lock in torch, some microseconds per event, so that
training pauses. Before the first capture of a process the number of events is estimated from the autograd
nodes of one step. Later estimates follow from the pause of the capture before.
"""

from collections.abc import Callable
from typing import Final

from torchperfd.captures.state import CaptureOptions
from torchperfd.model.capture_options import CaptureKind
from torchperfd.safety.interrupts import Flag
from torchperfd.v1.contract import LONG_PAUSE_S

# From `python -m benchmarks.capture.pause`: seconds per operator event, and what else each adds to it.
_OPERATORS_S: Final = 5e-6
_SHAPES_S: Final = 9.5e-6
_STACKS_S: Final = 5e-6
_MEMORY_S: Final = 1.5e-6

_EVENTS_PER_NODE: Final = 25
"""Operator events of a training step for each autograd node; 10 to 40 for models on the CPU with SGD."""


class PauseEstimate:
    """What is known in one process of the pauses that captures cause."""

    def __init__(self) -> None:
        self._events_per_step = 0.0

    @property
    def is_known(self) -> bool:
        """Whether there is anything to estimate from."""
        return self._events_per_step > 0

    def seconds(self, options: CaptureOptions) -> float:
        """Return how long training will pause; 0 if unknown."""
        if options.kind == CaptureKind.MEMORY:
            return 0.0
        return self._events_per_step * options.steps * _seconds_per_event(options)

    def learn_nodes(self, nodes: int) -> None:
        """A training step had so many autograd nodes. What a capture has shown counts more."""
        if not self.is_known:
            self._events_per_step = float(nodes * _EVENTS_PER_NODE)

    def learn_pause(self, seconds: float, options: CaptureOptions) -> None:
        """Training paused for so long when a capture with these options ended."""
        if options.kind != CaptureKind.MEMORY:
            self._events_per_step = seconds / options.steps / _seconds_per_event(options)


class NodeCounter:
    """Counts the autograd nodes of one training step. A ``StepWatcher``.

    Args:
        read: Returns the number of nodes that the calling thread has made so far.

    Attributes:
        nodes: Those of one step; 0 until ``ended`` is set.
    """

    def __init__(self, read: Callable[[], int]) -> None:
        self.nodes = 0
        self.ended = Flag()
        self._read = read
        self._before: int | None = None

    def train_edge(self, next_index: int) -> None:
        """Begin to count, or end."""
        if self.ended.is_set():
            return
        now = self._read()
        if self._before is None:
            self._before = now
        else:
            self.nodes = now - self._before
            self.ended.set()

    def validate_edge(self) -> None:
        """Begin again: what was counted has a validation step in it."""
        self._before = None


def warning(seconds: float, options: CaptureOptions) -> str:
    """Return a warning with the pause and how to shorten it; '' if the pause is short."""
    if seconds <= LONG_PAUSE_S:
        return ""
    extras = {
        "shapes": options.record_shapes,
        "FLOPs": options.with_flops,
        "stacks": options.with_stack,
        "modules": options.with_modules,
        "memory": options.profile_memory,
    }
    recorded = [name for name, is_on in extras.items() if is_on]
    more = f", or leave out {' and '.join(recorded)}" if recorded else ""
    return (
        f"training will pause for about {seconds:.1f} s when the capture of {options.steps} step(s) ends;"
        f" capture fewer steps{more}"
    )


def _seconds_per_event(options: CaptureOptions) -> float:
    seconds = _OPERATORS_S
    if options.record_shapes or options.with_flops:
        seconds += _SHAPES_S
    if options.with_stack or options.with_modules:
        seconds += _STACKS_S
    if options.profile_memory:
        seconds += _MEMORY_S
    return seconds
