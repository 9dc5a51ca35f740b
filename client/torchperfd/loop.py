"""The loop: decides from draws, forwards, backwards and optimizer steps what a step is.

A training step runs from one draw of a batch to the next, provided an optimizer
stepped in between; draws without one are micro-batches of the same step. Where
nothing is drawn on this thread, it runs from optimizer step to optimizer step.
A validation step is a draw and a forward without gradients, up to the next
draw. What lies between two loops (building an iterator, printing, saving)
belongs to no step.

All methods are called on the training thread, from hooks.
"""

from threading import get_ident
from typing import Protocol

from torchperfd.recorder import (
    BACKWARD,
    DATA,
    FORWARD,
    LOSS,
    OPTIMIZER,
    OTHER,
    TRAIN,
    VALIDATE,
    Recorder,
)


class StepWatcher(Protocol):
    """Something that must act on the training thread at step edges: a capture."""

    def train_edge(self, next_index: int) -> None:
        """A training step has ended; ``next_index`` begins now."""

    def validate_edge(self) -> None:
        """A validation step has ended."""


class Loop:
    """Follows one training loop on one thread."""

    __slots__ = (
        "_draws",
        "_drew",
        "_evaluated",
        "_explicit",
        "_first_draw",
        "_stepped",
        "recorder",
        "thread",
        "train_steps",
        "validate_steps",
        "watcher",
    )

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.thread = get_ident()
        self.train_steps = 0
        self.validate_steps = 0
        self.watcher: StepWatcher | None = None
        self._draws = False
        self._drew = False
        self._first_draw = False
        self._stepped = False
        self._evaluated = False
        self._explicit = False

    def draw_begin(self) -> None:
        """The loop asks its loader for a batch."""
        recorder = self.recorder
        if recorder.depth and recorder.inside(OPTIMIZER):
            # step() raised, so its post hook never ran; nobody draws inside an optimizer.
            recorder.unwind()
        if recorder.is_open and recorder.idle():
            if self._stepped and not self._explicit:
                self._close_train()
            elif self._evaluated:
                self._close_validate()
            elif not self._draws and not self._explicit:
                # The first loop begins: what a phase of the script's own has timed so far is set-up.
                recorder.abandon()
        self._draws = True
        self._first_draw = not self._drew
        self._drew = True
        recorder.enter(DATA)

    def draw_end(self, samples: int) -> None:
        """The batch is here."""
        self.recorder.exit()
        self.recorder.samples += samples

    def draw_stop(self) -> None:
        """The loader is exhausted: what comes now is between loops.

        Unless the step has drawn before: then this was a second loader, about to start over.
        """
        self.recorder.exit()
        if self._first_draw and self.recorder.idle():
            self._reset()
            self.recorder.abandon()

    def forward_begin(self, gradients: bool) -> None:
        """The model is called; ``gradients`` is false in evaluation."""
        recorder = self.recorder
        if not gradients and recorder.idle():
            if self._stepped and not self._explicit:
                # A loop that validates without drawing: the training step ended long ago.
                self._close_train()
                self._drew = False
            elif self._evaluated and not self._drew:
                self._close_validate()
            self._evaluated = True
        recorder.enter(FORWARD)

    def forward_end(self) -> None:
        """The model has answered; until the next event the loop computes its loss."""
        recorder = self.recorder
        recorder.exit()
        if recorder.depth == 0:
            recorder.name_gap(LOSS)

    def backward_begin(self) -> None:
        """Gradients are asked for, so this step trains whatever its forward looked like."""
        self._evaluated = False
        recorder = self.recorder
        recorder.enter(BACKWARD)
        if recorder.depth == 1:
            recorder.name_gap(OTHER)

    def optimizer_begin(self) -> None:
        """An optimizer step begins."""
        recorder = self.recorder
        recorder.enter(OPTIMIZER)
        if recorder.depth == 1:
            recorder.name_gap(OTHER)

    def optimizer_end(self) -> None:
        """An optimizer step has ended."""
        recorder = self.recorder
        recorder.exit()
        # Not open: a hook has failed since this optimizer step began, and the step was abandoned.
        if recorder.is_open and recorder.idle():
            self._stepped = True
            self._evaluated = False
            if not self._drew and not self._explicit:
                # Where loaders are used, this is the last batch of one that was drawn ahead.
                self._close_train(last=self._draws)

    def enter(self, phase: int) -> None:
        """Any other phase begins: the zeroing of gradients, or one of the script's own.

        It may lie within a step, between two loops, or around a whole one.
        """
        if self._draws:
            self.recorder.push(phase)
        else:
            self.recorder.enter(phase)

    def exit(self) -> None:
        """Whatever began last ends."""
        self.recorder.exit()

    def step(self, samples: int) -> None:
        """The script says that a training step ends here; from now on only it decides."""
        recorder = self.recorder
        self._explicit = True
        recorder.open()
        recorder.samples += samples
        self._close_train()

    def finish(self) -> None:
        """The loop is over: account for a last step that no draw has closed."""
        recorder = self.recorder
        recorder.unwind()
        if recorder.is_open and self._stepped and not self._explicit:
            self._close_train(last=True)
        elif recorder.is_open and self._evaluated:
            self._close_validate(last=True)
        self._reset()
        recorder.abandon()

    def _close_train(self, *, last: bool = False) -> None:
        self.recorder.close(TRAIN, self.train_steps, at_last=last)
        self.train_steps += 1
        self._reset()
        if self.watcher is not None:
            self.watcher.train_edge(self.train_steps)
            # What the watcher did is our time, not the next step's.
            self.recorder.skip()

    def _close_validate(self, *, last: bool = False) -> None:
        self.recorder.close(VALIDATE, self.validate_steps, at_last=last)
        self.validate_steps += 1
        self._reset()
        if self.watcher is not None:
            self.watcher.validate_edge()
            self.recorder.skip()

    def _reset(self) -> None:
        self._drew = self._stepped = self._evaluated = False
