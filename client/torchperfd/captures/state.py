"""Capture state: what a capture records, how far it is on this rank, and the pause at its end.

The state decides what each step edge means for the capture. The pause is estimated before the capture and
measured after it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from torchperfd.hooks.profiler import node_reader
from torchperfd.model import capture_options
from torchperfd.model.capture_options import CaptureKind
from torchperfd.safety.interrupts import Flag
from torchperfd.steps.replay import Replay
from torchperfd.v1.contract import LONG_PAUSE_S

_MAX_CAPTURE_STEPS: Final = 1000


@dataclass(frozen=True, slots=True)
class CaptureOptions(capture_options.CaptureOptions):
    """The options of a capture that this process can make."""

    def __post_init__(self) -> None:
        if not 1 <= self.steps <= _MAX_CAPTURE_STEPS:
            raise ValueError(f"steps must be 1 to {_MAX_CAPTURE_STEPS}, not {self.steps}")
        if self.kind not in tuple(CaptureKind):
            raise ValueError(f"kind must be one of {', '.join(CaptureKind)}, not {self.kind!r}")


_FOREIGN_STEPS_ALLOWED: Final = 10


class CaptureStage(Enum):
    """How far a capture in this process is."""

    QUEUED = "queued"
    PREPARING = "preparing"
    READY = "ready"
    ARMED = "armed"
    RUNNING = "running"
    EXPORTING = "exporting"
    COMPLETE = "complete"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class CaptureOutcome:
    """How a capture of this rank ended.

    Attributes:
        ok: A whole trace of all agreed steps is on disk.
        reason: Why not, in one line; empty when ok.
        retry: It failed only because the moment was wrong.
        start_step: First training step of the range, counting from 0.
        file: Name of the trace below the capture's directory.
        sha256: Its hash, in hexadecimal.
    """

    ok: bool
    reason: str = ""
    retry: bool = False
    start_step: int = 0
    file: str = ""
    bytes: int = 0
    sha256: str = ""


class Action(Enum):
    """What a capture does at a step edge."""

    WAIT = "wait"
    START = "start"
    CONTINUE = "continue"
    STOP = "stop"
    GIVE_UP = "give up"
    UNWATCH = "unwatch"


@dataclass(frozen=True, slots=True)
class Decision:
    """An action, and for ``GIVE_UP`` why and whether another attempt may succeed."""

    action: Action
    reason: str = ""
    retry: bool = False


class CaptureState:
    """One capture of this rank, as numbers.

    Attributes:
        options: What is recorded; the number of steps may change when the capture is armed.
        stage: How far it is.
        start_step: First training step of the range, counting from 0.
        steps_made: Of those agreed on, while the profiler was on.
        cancel_reason: Why it is to be given up; empty when it is not.
        pause_seconds: How long training pauses when it ends: estimated, afterwards measured; 0 if unknown.
        launches: Launches of kernels in the trace; 0 without a trace or a device.
        outcome: How it ended; None before that.
    """

    def __init__(self, options: CaptureOptions) -> None:
        self.options = options
        self.stage = CaptureStage.PREPARING
        self.start_step = 0
        self.steps_made = 0
        self.is_recording = False
        self.cancel_reason = ""
        self.pause_seconds = 0.0
        self.launches = self.kernels = 0
        self.outcome: CaptureOutcome | None = None
        self._starts_anywhere = False
        self._foreign_steps = 0

    @property
    def is_ending(self) -> bool:
        """Whether it was given up or has its outcome, so that it is over in a moment."""
        return bool(self.cancel_reason) or self.outcome is not None

    @property
    def can_end_at_once(self) -> bool:
        """Whether nothing is being recorded or written yet."""
        return self.stage in (
            CaptureStage.QUEUED,
            CaptureStage.PREPARING,
            CaptureStage.READY,
            CaptureStage.ARMED,
        )

    @property
    def refusal(self) -> str:
        """Why no trace is wanted any more; empty while it is."""
        # It may have been given up meanwhile, as the process is ending.
        return self.cancel_reason or (self.outcome.reason if self.outcome is not None else "")

    def agree(self, start_step: int | None, steps: int) -> None:
        """Take the agreed steps.

        Args:
            start_step: The first one; None for the next one, whichever that is.
            steps: Number of steps; 0 for the number in the options.

        Raises:
            ValueError: No capture has so many.
        """
        self.options = replace(self.options, steps=steps or self.options.steps)
        self._starts_anywhere = start_step is None
        self.start_step = start_step or 0

    def train_edge(self, next_index: int) -> Decision:
        """Decide what to do before training step ``next_index``."""
        if self.is_recording:
            self.steps_made = next_index - self.start_step
            if self.cancel_reason:
                return Decision(Action.GIVE_UP, self.cancel_reason)
            ends = next_index == self.start_step + self.options.steps
            return Decision(Action.STOP if ends else Action.CONTINUE)
        if self.outcome is not None:
            # It was given up at the moment at which it was armed.
            return Decision(Action.UNWATCH)
        if self._starts_anywhere:
            self.start_step = next_index
        if next_index == self.start_step and not self.cancel_reason:
            return Decision(Action.START)
        if next_index >= self.start_step:
            reason = self.cancel_reason or f"step {self.start_step} was missed"
            return Decision(Action.GIVE_UP, reason, retry=True)
        return Decision(Action.WAIT)

    def validate_edge(self) -> Decision:
        """A short validation is fine, a long one fills the memory."""
        if not self.is_recording:
            return Decision(Action.WAIT)
        self._foreign_steps += 1
        if self.cancel_reason:
            return Decision(Action.GIVE_UP, self.cancel_reason)
        if self._foreign_steps > max(_FOREIGN_STEPS_ALLOWED, 4 * self.options.steps):
            return Decision(Action.GIVE_UP, "a validation began among the chosen steps", retry=True)
        return Decision(Action.WAIT)

    def end(self, outcome: CaptureOutcome) -> None:
        self.outcome = outcome
        self.stage = CaptureStage.COMPLETE if outcome.ok else CaptureStage.FAILED
        if not outcome.ok:
            self.pause_seconds = 0.0


# From `python -m benchmarks.capture.pause`: seconds per operator event, and what else each adds to it.
_OPERATORS_S: Final = 5e-6
_SHAPES_S: Final = 9.5e-6
_STACKS_S: Final = 5e-6
_MEMORY_S: Final = 1.5e-6

_MAX_COUNT_S: Final = 2.0
"""How long a first capture waits for the two step edges between which autograd nodes are counted."""
_EVENTS_PER_NODE: Final = 25
"""Operator events of a training step for each autograd node; 10 to 40 for models on the CPU with SGD."""


class PauseEstimate:
    """What is known in one process of the pauses that captures cause."""

    def __init__(self) -> None:
        self._events_per_step = 0.0

    @property
    def is_known(self) -> bool:
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

    def count_nodes(self, replay: Replay, step_seconds: float) -> None:
        """Count the autograd nodes of the next training step if nothing is known; wait for two edges."""
        read = node_reader()
        if self.is_known or not step_seconds or read is None:
            return
        counter = NodeCounter(read)
        replay.watch(counter)
        if counter.ended.wait(min(_MAX_COUNT_S, 3 * step_seconds + 0.1)):
            self.learn_nodes(counter.nodes)
        replay.unwatch(counter)

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
