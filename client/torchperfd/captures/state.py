"""Capture state: what a capture records, how far it is on this rank, and what each step edge means for it.

Nothing here touches torch, files or threads, so every decision can be tested with numbers alone.
"""

from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from torchperfd.model import capture_options
from torchperfd.model.capture_options import CaptureKind

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
        bytes: Its size.
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
        is_recording: The profiler is on.
        cancel_reason: Why it is to be given up; empty when it is not.
        pause_seconds: How long training pauses when it ends: estimated, afterwards measured; 0 if unknown.
        launches: Launches of kernels in the trace; 0 without a trace or a device.
        kernels: Kernels in the trace.
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
        """Set the outcome."""
        self.outcome = outcome
        self.stage = CaptureStage.COMPLETE if outcome.ok else CaptureStage.FAILED
        if not outcome.ok:
            self.pause_seconds = 0.0
