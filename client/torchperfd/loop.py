"""The loop: decides from draws, forwards, backwards and optimizer steps what a step is.

A training step runs from one draw of a batch to the next, provided an optimizer
stepped in between, or was to: a ``GradScaler`` that finds infinite gradients
calls the step off, and that batch is over nevertheless. Draws without one are
micro-batches of the same step. Where nothing is drawn on this thread, a step
ends with the last optimizer step before an optimizer steps that has stepped in
it already. A validation step is a draw and a forward without gradients, up to
the next draw. What lies between two loops (building an iterator, printing,
saving) belongs to no step.

Some edges are known only later: a micro-batch differs from a batch whose
gradients are thrown away by what comes after the next draw. There, what the
step has so far is set aside, and rejoins what follows or is a step of its own.

All methods are called by who reads the tape, event by event, under its lock.
"""

import time
from collections.abc import Callable
from typing import Final, Protocol

from torchperfd.recorder import (
    BACKWARD,
    CHECKPOINT,
    DATA,
    FORWARD,
    LOSS,
    OPTIMIZER,
    OTHER,
    TRAIN,
    VALIDATE,
    ZERO_GRAD,
    Clock,
    Recorder,
)

# What is set aside: nothing; a step of a loop that does not draw, which ends here unless another
# optimizer steps; one that ends here unless its batch goes on after a forward without gradients;
# or a batch without an optimizer step, of which the gradients may yet be used.
_NOTHING, _STEPPED, _EVALUATED, _PENDING = range(4)
_UNKNOWN: Final = 0

_COUNTS: Final = (
    *("train_steps", "validate_steps", "micro_batches", "tokens"),
    *("optimizer_calls", "refused", "_unused"),
)


class StepWatcher(Protocol):
    """Something that must act on the training thread at step edges: a capture."""

    def train_edge(self, next_index: int) -> None:
        """A training step has ended; ``next_index`` begins now."""

    def validate_edge(self) -> None:
        """A validation step has ended."""


class Loop:
    """Follows one training loop.

    Args:
        recorder: What times its steps.
        clock: When that happened which is being told.
        present: Monotonic nanoseconds: what time it is.

    Attributes:
        train_steps: Training steps that have ended.
        validate_steps: Validation steps that have ended.
        micro_batches: Batches that went backward in those training steps; at least one each.
        tokens: Tokens that the script has told of.
        warmup_tokens: Those of the first training step.
        refused: Optimizer steps that a ``GradScaler`` has refused.
        ready: Batches that waited in the workers' queue at the newest draw, -1 without workers.
        saves: Checkpoints written between steps.
        save_ns: What they took; those within a step are its phase ``checkpoint``.
        save_squares: Sum over them of squared nanoseconds.
        saving: How many saves are under way, one within the other.
        watcher: Who is told of step edges.
    """

    __slots__ = (
        "_aside",
        "_aside_backwards",
        "_aside_draws",
        "_aside_drew",
        "_aside_optimizers",
        "_backwards",
        "_clock",
        "_closer",
        "_draws",
        "_drew",
        "_evaluated",
        "_explicit",
        "_first_draw",
        "_in_backward",
        "_last_optimizer",
        "_optimizers",
        "_present",
        "_samples_before",
        "_saving_since",
        "_step_draws",
        "_stepped",
        "_steppers",
        "_uncounted",
        "_unused",
        "_zeroed",
        "has_stepped",
        "micro_batches",
        "optimizer_calls",
        "ready",
        "recorder",
        "refused",
        "save_ns",
        "save_squares",
        "saves",
        "saving",
        "tokens",
        "train_steps",
        "validate_steps",
        "warmup_tokens",
        "watcher",
    )

    def __init__(
        self,
        recorder: Recorder,
        clock: Clock,
        present: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.recorder = recorder
        self.train_steps = 0
        self.validate_steps = 0
        self.micro_batches = 0
        self.tokens = 0
        self.warmup_tokens = 0
        self.refused = 0
        self.ready = -1
        self.saves = 0
        self.save_ns = 0
        self.save_squares = 0.0
        self.saving = 0
        self.watcher: StepWatcher | None = None
        self.optimizer_calls = 0
        self.has_stepped = False
        self._clock = clock
        self._present = present
        self._saving_since = 0
        self._unused = 0
        # Of the newest batch that a framework drew.
        self._samples_before = 0
        self._uncounted = False
        # Of the whole loop: does it draw, does the script say where steps end, and the optimizer
        # that steps last in a step.
        self._draws = False
        self._explicit = False
        self._closer = _UNKNOWN
        # Of the step in progress.
        self._drew = False
        self._first_draw = False
        self._stepped = False
        self._evaluated = False
        self._zeroed = False
        self._step_draws = 0
        self._backwards = 0
        self._optimizers = 0
        self._last_optimizer = _UNKNOWN
        self._in_backward = _UNKNOWN
        # Of what is set aside.
        self._aside = _NOTHING
        self._aside_drew = False
        self._aside_draws = 0
        self._aside_backwards = 0
        self._aside_optimizers = 0
        self._steppers: set[int] = set()

    @property
    def skipped(self) -> int:
        """Optimizer steps that were called off: refused, or their gradients zeroed unused."""
        # Where no optimizer is ever seen, it steps inside a compiled graph.
        return self.refused + (self._unused if self.has_stepped else 0)

    # For who repeats what was told.

    def standing(self) -> tuple[object, ...]:
        """Return all that decides what an event means; counts decide nothing, but that there are any."""
        return (
            *(self._aside, self._aside_drew, self._aside_draws),
            *(self._aside_backwards, self._aside_optimizers),
            *(self._drew, self._first_draw, self._stepped, self._evaluated, self._zeroed),
            *(self._step_draws, self._backwards, self._optimizers, self._samples_before, self._uncounted),
            *(self._draws, self._explicit, self._closer, self._last_optimizer, self._in_backward),
            *(self.has_stepped, self.saving, self.watcher is None, self.train_steps > 0),
            frozenset(self._steppers),
        )

    def counts(self) -> dict[str, int]:
        """Return what only ever grows, by name."""
        return {name: getattr(self, name) for name in _COUNTS}

    def count_on(self, counted: dict[str, int], times: int) -> None:
        """Have each count grow so many times by so much."""
        for name, growth in counted.items():
            setattr(self, name, getattr(self, name) + times * growth)

    # Draws.

    def draw_begin(self) -> None:
        """The loop asks its loader for a batch."""
        recorder = self.recorder
        if recorder.depth and recorder.inside(OPTIMIZER):
            # step() raised, so its post hook never ran; a closure's draws are told apart by the hook.
            recorder.unwind()
        if self._aside and self._aside != _PENDING and recorder.idle():
            self._release()
        if recorder.is_open and recorder.idle():
            if self._stepped and not self._explicit:
                self._closer = self._last_optimizer
                self._close_train()
            elif self._evaluated:
                self._close_validate()
            elif self._explicit:
                pass
            elif not self._draws:
                # The first loop begins: what a phase of the script's own has timed so far is set-up.
                recorder.abandon()
            elif self._backwards:
                if self._zeroed:
                    # Its gradients are gone: whatever comes, this batch is over.
                    self._unused += 1
                    self._close_train()
                else:
                    self._set_aside(_PENDING)
        self._draws = True
        self._first_draw = not self._drew
        self._drew = True
        recorder.enter(DATA)

    def closure_draw_begin(self) -> None:
        """The closure of an optimizer that is at work asks for a batch: no edge can be here."""
        self._first_draw = False
        self.recorder.enter(DATA)

    def draw_end(self, samples: int) -> None:
        """The batch is here."""
        self.recorder.exit()
        self.recorder.samples += samples
        self._step_draws += 1

    def outer_draw_begin(self) -> None:
        """A framework asks for a batch; DataLoaders inside may tell of the same one."""
        self.draw_begin()
        self._samples_before = self.recorder.samples

    def outer_draw_end(self, samples: int) -> None:
        """The batch is here; its samples count unless a DataLoader inside has counted them."""
        self._uncounted = self.recorder.samples == self._samples_before
        self.draw_end(0)
        self.count(samples)

    def count(self, samples: int) -> None:
        """Count the samples of the newest batch that a framework drew, unless they are counted."""
        if samples and self._uncounted:
            self._uncounted = False
            self.recorder.samples += samples

    def draw_stop(self) -> None:
        """The loader is exhausted: what comes now is between loops.

        Unless the step has drawn before: then this was a second loader, about to start over.
        """
        self.recorder.exit()
        if self._first_draw and self.recorder.idle():
            self._reset()
            self.recorder.abandon()

    # The model.

    def forward_begin(self, gradients: bool) -> None:
        """The model is called; ``gradients`` is false in evaluation."""
        recorder = self.recorder
        if not gradients and recorder.idle():
            if self._stepped and not self._explicit:
                # A loop that validates without drawing: the training step ended long ago. Unless a
                # backward follows: then this was part of it, as the samples of a GAN are.
                self._set_aside(_EVALUATED)
            elif self._evaluated and not self._drew:
                if self._aside and self._aside != _PENDING:
                    self._release()
                self._close_validate()
            elif self._aside == _STEPPED:
                self._set_aside(_STEPPED)
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
        if recorder.idle():
            if self._aside > _STEPPED:
                self._rejoin()
            self._backwards += 1
            self._zeroed = False
        recorder.enter(BACKWARD)
        if recorder.depth == 1:
            recorder.name_gap(OTHER)

    def backward_end(self, depth: int) -> None:
        """The gradients are there, and the phases that began above ``depth`` are over."""
        self.leave(depth)
        if self._in_backward and self.recorder.is_open and self.recorder.idle():
            # Optimizers that step from hooks on the gradients, one per parameter: one step.
            optimizer, self._in_backward = self._in_backward, _UNKNOWN
            self._step_ended(optimizer)

    def zero_begin(self) -> None:
        """Gradients are about to be zeroed."""
        if self._aside == _PENDING and self.recorder.idle():
            # The batch before the newest draw was not a micro-batch: its gradients go unused.
            self._unused += 1
            self._release()
        elif self._backwards and not self._stepped and self.recorder.idle():
            self._zeroed = True
        self.enter(ZERO_GRAD)

    # Optimizers, told apart by a number of their own.

    def optimizer_begin(self, optimizer: int = _UNKNOWN) -> None:
        """An optimizer step begins, or a ``GradScaler`` is asked for one."""
        recorder = self.recorder
        if self._aside:
            if self._aside != _STEPPED:
                self._rejoin()
            elif optimizer in self._steppers:
                self._closer = self._last_optimizer
                self._release()
        self.optimizer_calls += 1
        recorder.enter(OPTIMIZER)
        if recorder.depth == 1:
            recorder.name_gap(OTHER)

    def optimizer_end(self, optimizer: int = _UNKNOWN, called_off: bool = False) -> None:
        """An optimizer step has ended; ``called_off`` when the scaler has refused it."""
        recorder = self.recorder
        recorder.exit()
        # Not open: a hook has failed since this optimizer step began, and the step was abandoned.
        if not recorder.is_open:
            return
        if recorder.idle():
            self.refused += called_off
            self._step_ended(optimizer)
        elif self._in_backward == _UNKNOWN and not recorder.inside(OPTIMIZER):
            self._in_backward = optimizer

    def stepped_elsewhere(self, optimizer: int) -> None:
        """An optimizer stepped on one of autograd's own threads, as it does for other devices."""
        if self._in_backward == _UNKNOWN and self.recorder.depth and self.recorder.inside(BACKWARD):
            self._in_backward = optimizer

    def _step_ended(self, optimizer: int) -> None:
        if self._aside > _STEPPED:
            # It had begun before that was set aside: what is left of a step that has failed.
            self._rejoin()
        self._stepped = self.has_stepped = True
        self._evaluated = False
        self._optimizers += 1
        if self._drew or self._explicit:
            self._last_optimizer = optimizer
            return
        if optimizer == self._closer or (self._draws and self._closer == _UNKNOWN):
            if self._aside:
                self._rejoin()
            self._last_optimizer = optimizer
            # Where loaders are used, this is the last batch of one that was drawn ahead.
            self._close_train(last=self._draws)
        elif not self._draws:
            self._set_aside(_STEPPED)
            self._last_optimizer = optimizer
            self._steppers.add(optimizer)

    # What the script says, and saves.

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

    def leave(self, depth: int) -> None:
        """Whatever began above ``depth`` ends: one phase, and those whose other half never came."""
        recorder = self.recorder
        while recorder.depth > depth:
            recorder.exit()

    def save_begin(self) -> None:
        """A checkpoint is about to be written: a phase of the step, or between two."""
        if self.recorder.is_open:
            self.recorder.enter(CHECKPOINT)
        elif not self._saving_since:
            self._saving_since = self._clock.now
        self.saving += 1

    def save_end(self, depth: int) -> None:
        """The checkpoint is written."""
        self.leave(depth)
        self.saving -= 1
        if self._saving_since and not self.saving:
            spent = self._clock.now - self._saving_since
            self.saves += 1
            self.save_ns += spent
            self.save_squares += spent * spent
            self._saving_since = 0

    def step(self, samples: int) -> None:
        """The script says that a training step ends here; from now on only it decides."""
        recorder = self.recorder
        self._explicit = True
        if self._aside:
            self._rejoin()
        recorder.open()
        recorder.samples += samples
        self._close_train()

    # The loop as a whole.

    def adopt(self) -> None:
        """Another thread's loop is followed from now on; nothing of this one's has trained."""
        self.recorder.unwind()
        self.recorder.abandon()
        self._draws = False
        self._reset()

    def finish(self) -> None:
        """The loop is over: account for a last step that no draw has closed."""
        recorder = self.recorder
        recorder.unwind()
        # Where optimizers step unseen, inside a compiled graph, a backward is all there is.
        unseen = self.train_steps > 0 and not self.has_stepped and not self._explicit
        if self._aside and (self._aside != _PENDING or unseen):
            self._release()
        elif self._aside:
            self._aside = _NOTHING
            recorder.discard()
        if recorder.is_open and (self._stepped or (unseen and self._backwards)) and not self._explicit:
            self._close_train(last=True)
        elif recorder.is_open and self._evaluated:
            self._close_validate(last=True)
        self._reset()
        recorder.abandon()

    # Edges.

    def _close_train(self, *, last: bool = False) -> None:
        self.recorder.close(TRAIN, self.train_steps, at_last=last)
        if self._backwards < 2:
            self.micro_batches += 1
        else:
            self.micro_batches += _micro_batches(self._step_draws, self._backwards, self._optimizers)
        self._count_train_step()
        self._reset()
        if self.watcher is not None:
            self.watcher.train_edge(self.train_steps)
            # What the watcher did is our time, not the next step's.
            self.recorder.skip(self._present())

    def _count_train_step(self) -> None:
        if not self.train_steps:
            self.warmup_tokens = self.tokens
        self.train_steps += 1

    def _close_validate(self, *, last: bool = False) -> None:
        if self._aside:
            self.recorder.separate()
        self.recorder.close(VALIDATE, self.validate_steps, at_last=last)
        self.validate_steps += 1
        self._reset()
        if self.watcher is not None:
            self.watcher.validate_edge()
            self.recorder.skip(self._present())

    def _reset(self) -> None:
        self._drew = self._stepped = self._evaluated = self._zeroed = False
        self._step_draws = self._backwards = self._optimizers = 0

    def _set_aside(self, kind: int) -> None:
        """The step may have ended here: keep what follows apart until that is known."""
        if self._aside:
            self._rejoin()
        self.recorder.hold()
        self._aside = kind
        self._aside_drew = self._drew
        self._aside_draws = self._step_draws
        self._aside_backwards = self._backwards
        self._aside_optimizers = self._optimizers
        self._reset()

    def _rejoin(self) -> None:
        """The step had not ended where it was set aside."""
        self.recorder.rejoin()
        if self._aside != _PENDING:
            self._stepped = True
        self._aside = _NOTHING
        self._drew = self._drew or self._aside_drew
        self._step_draws += self._aside_draws
        self._backwards += self._aside_backwards
        self._optimizers += self._aside_optimizers

    def _release(self) -> None:
        """The step had ended where it was set aside; what followed is the next one so far."""
        self.recorder.release(TRAIN, self.train_steps)
        self.micro_batches += _micro_batches(self._aside_draws, self._aside_backwards, self._aside_optimizers)
        self._aside = _NOTHING
        self._steppers.clear()
        self._count_train_step()
        if self.watcher is not None:
            self.watcher.train_edge(self.train_steps)


def _micro_batches(draws: int, backwards: int, optimizers: int) -> int:
    """Return how many batches a step has accumulated.

    Two loaders draw twice per backward, two losses go backward twice per draw: the smaller
    number it is. Where nothing is drawn, each optimizer has its backward.
    """
    if draws:
        return max(1, min(draws, backwards))
    return max(1, backwards // max(1, optimizers))
