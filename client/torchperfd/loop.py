"""The loop: decides from draws, forwards, backwards and optimizer steps what a step is.

A training step runs from one draw of a batch to the next, provided an optimizer
stepped in between, or was to: a ``GradScaler`` that finds infinite gradients
calls the step off, and that batch is over nevertheless. Draws without one are
micro-batches of the same step. Where nothing is drawn on this thread, or one
batch serves several steps, a step ends with the last optimizer step before an
optimizer steps that has stepped in it already. A validation step is a draw for
evaluation, or a draw and a forward without gradients, up to the next draw; where
nothing is drawn, a forward without gradients in evaluation mode. What lies
between two loops (building an iterator, printing, saving, a pause after a loop
that was left early) belongs to no step.

Some edges are known only later: a micro-batch differs from a batch whose
gradients are thrown away by what comes after the next draw. There, what the
step has so far is set aside, and rejoins what follows or is a step of its own.

All methods are called by who reads the tape, event by event, under its lock.
"""

import time
from collections.abc import Callable
from typing import Final, Protocol

from torchperfd.drawn_batches import DrawnBatches
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
from torchperfd.step_state import StepState

# What is set aside: nothing; a step that ends here unless another optimizer steps; one that ends here
# unless its batch goes on after a forward without gradients; a batch without an optimizer step, of which
# the gradients may yet be used; a draw for evaluation, which may have been made ahead of its forward; or
# the beginning of a step, in which the loop has turned to something else.
_NOTHING, _STEPPED, _EVALUATED, _PENDING, _UNSEEN, _BEGUN = range(6)
_UNKNOWN: Final = 0
# After so many steps of one optimizer on one batch, others that have never stepped take no part in it.
_STEPS_OF_ONE: Final = 8
_MOST_UNSTEPPED: Final = 16

_COUNTS: Final = (
    *("train_steps", "validate_steps", "micro_batches", "tokens", "backward_calls"),
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
        backward_calls: Backward passes, whether or not they are part of a step.
        refused: Optimizer steps that a ``GradScaler`` has refused.
        ready: Batches that waited in the workers' queue at the newest draw, -1 without workers.
        saves: Checkpoints written between steps.
        save_ns: What they took; those within a step are its phase ``checkpoint``.
        save_squares: Sum over them of squared nanoseconds.
        saving: How many saves are under way, one within the other.
        watcher: Who is told of step edges.
    """

    __slots__ = (
        "_acts",
        "_aside",
        "_aside_step",
        "_clock",
        "_closer",
        "_drawn",
        "_draws",
        "_draws_ahead",
        "_ended",
        "_explicit",
        "_first_draw",
        "_in_backward",
        "_inner_samples",
        "_model_trains",
        "_present",
        "_round",
        "_saving_since",
        "_seen_evaluating",
        "_step",
        "_trains_in_eval_mode",
        "_uncounted",
        "_unseen",
        "_unstepped",
        "_unused",
        "backward_calls",
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
        self.backward_calls = 0
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
        # Of the newest batch: what draws within its draw brought, and whether its samples are unknown.
        self._inner_samples = 0
        self._uncounted = False
        # Of the whole loop: does it draw, does it draw ahead, has the iterator ended that it drew from last,
        # does the script say where steps end, the optimizer that steps last in a step, those of the newest
        # step, and those that have never stepped.
        self._draws = False
        self._draws_ahead = False
        self._ended = False
        self._explicit = False
        self._closer = _UNKNOWN
        self._round: frozenset[int] = frozenset()
        self._unstepped: set[int] = set()
        # Of its model: does it act, did a backward follow a forward of it, even in evaluation mode; and of
        # which iterator's batches was its evaluation seen, or of none where draws are all that is to be seen.
        self._acts = False
        self._model_trains = False
        self._trains_in_eval_mode = False
        self._seen_evaluating = 0
        self._unseen = False
        # Of the step in progress, and of what is set aside.
        self._drawn = DrawnBatches()
        self._first_draw = False
        self._in_backward = _UNKNOWN
        self._step = StepState()
        self._aside = _NOTHING
        self._aside_step = StepState()

    @property
    def skipped(self) -> int:
        """Optimizer steps that were called off: refused, or their gradients zeroed unused."""
        # Where no optimizer is ever seen, it steps inside a compiled graph.
        return self.refused + (self._unused if self.has_stepped else 0)

    # For who repeats what was told.

    def standing(self) -> tuple[object, ...]:
        """Return all that decides what an event means; counts decide nothing, but that there are any."""
        return (
            *self._step.key(),
            *((self._aside, *self._aside_step.key()) if self._aside else ()),
            *(self._first_draw, self._inner_samples, self._uncounted),
            *(self._draws, self._draws_ahead, self._ended, self._explicit),
            *(self._closer, self._round, self._in_backward),
            *(frozenset(self._unstepped), self._acts, self._model_trains),
            *(self._trains_in_eval_mode, self._unseen),
            self._seen_evaluating == self._drawn.current,
            *(self.has_stepped, self.saving, self.watcher is None, self.train_steps > 0),
            *self._drawn.state(),
        )

    def counts(self) -> dict[str, int]:
        """Return what only ever grows, by name."""
        return {name: getattr(self, name) for name in _COUNTS}

    def count_on(self, counted: dict[str, int], times: int) -> None:
        """Have each count grow so many times by so much."""
        for name, growth in counted.items():
            setattr(self, name, getattr(self, name) + times * growth)

    # Draws.

    def draw_begin(self, iterator: int = 0, *, gradients: bool = True, evaluation_mode: bool = False) -> None:
        """The loop asks its loader for a batch.

        Args:
            iterator: A number for the iterator that is asked.
            gradients: They are computed at the moment.
            evaluation_mode: All models that are trained are in evaluation mode.
        """
        recorder = self.recorder
        if recorder.depth and recorder.inside(OPTIMIZER):
            # step() raised, so its post hook never ran; a closure's draws are told apart by the hook.
            recorder.unwind()
        if recorder.depth and recorder.inside(DATA):
            # A data set that reads from a loader, or a prefetcher around one: the outer draw is the loop's.
            recorder.enter(DATA)
            return
        # Where batches are drawn ahead, a model may be back in training mode only after the draw.
        has_trained = self.train_steps > 0 or self._step.stepped
        for_evaluation = not gradients or (evaluation_mode and has_trained and not self._draws_ahead)
        if recorder.idle():
            self._edge_at_draw(iterator, for_evaluation)
        self._draws = True
        self._ended = False
        self._inner_samples = 0
        self._first_draw = not self._step.drew
        self._step.begin_draw(for_evaluation)
        self._drawn.begin(iterator)
        recorder.enter(DATA)

    def _edge_at_draw(self, iterator: int, for_evaluation: bool) -> None:
        """Decide what the draw that begins says of the step before it."""
        recorder, step = self.recorder, self._step
        on_batch = self._aside == _STEPPED or (self._aside == _EVALUATED and step.backwards)
        if on_batch and self._aside_step.drew and not step.stepped:
            # A forward or backward after the optimizer step, and no further one: it was that batch's.
            self._rejoin()
            step = self._step
        elif self._aside in (_STEPPED, _EVALUATED):
            self._release()
        elif self._aside == _BEGUN:
            self._discard()
        elif self._aside == _UNSEEN and not step.evaluated:
            self._unseen = True
            self._release(VALIDATE)
        if not recorder.is_open:
            return
        if step.stepped and not self._explicit:
            self._closer = step.last_optimizer
            self._close_train()
        elif step.evaluated:
            self._close_validate()
        elif self._explicit:
            pass
        elif not self._draws:
            # The first loop begins: what a phase of the script's own has timed so far is set-up.
            self._forget()
        elif step.backwards:
            if step.zeroed:
                # Its gradients are gone: whatever comes, this batch is over.
                self._unused += 1
                self._close_train()
            else:
                self._set_aside(_PENDING)
        elif step.for_evaluation or (for_evaluation and self._drawn.iterators == [iterator]):
            # The first batch may have been drawn ahead of the evaluation, to look at.
            self._edge_at_unseen_draw(for_evaluation)
        elif for_evaluation or (step.resumed and not step.drew):
            # What the loop has drawn stays for later; a validation has no part in it.
            self._forget()

    def _edge_at_unseen_draw(self, for_evaluation: bool) -> None:
        """A batch was drawn for evaluation, and no forward of it was seen."""
        seen = self._seen_evaluating == self._drawn.current
        if not seen and (self._unseen or self._aside):
            self._unseen = True
            self._close_validate()
        elif not for_evaluation:
            # The loop that trains goes on. The last batch of an evaluation that was seen was not used.
            self._forget() if seen else self._close_validate()
        elif not seen:
            self._set_aside(_UNSEEN)

    def closure_draw_begin(self) -> None:
        """The closure of an optimizer that is at work asks for a batch: no edge can be here."""
        self._first_draw = False
        self._inner_samples = 0
        self.recorder.enter(DATA)

    def draw_end(self, samples: int) -> None:
        """The batch is here. Of draws within one another the outermost counts, if it knows its samples."""
        recorder = self.recorder
        recorder.exit()
        if recorder.depth and recorder.inside(DATA):
            self._inner_samples += samples
            return
        samples = samples or self._inner_samples
        self._uncounted = not samples
        recorder.samples += samples
        self._step.batches += 1
        if not (recorder.depth and recorder.inside(OPTIMIZER)):
            self._drawn.add(samples)

    def count(self, samples: int) -> None:
        """Count the samples of the newest batch that a framework drew, unless they are counted."""
        if samples and self._uncounted:
            self._uncounted = False
            self.recorder.samples += samples
            self._drawn.count(samples)

    def draw_stop(self, iterator: int = 0) -> None:
        """The loader is exhausted: what comes now is between loops.

        Unless the step has drawn before, from another loader: then this was a second one that starts over.
        """
        recorder, step = self.recorder, self._step
        recorder.exit()
        if not recorder.idle():
            return
        self._drawn.exhausted(iterator)
        self._ended = self._first_draw or self._drawn.iterators == [iterator]
        if self._aside == _UNSEEN and not step.evaluated:
            self._unseen = True
            self._release(VALIDATE)
            self._forget()
        elif self._first_draw:
            self._forget()
        elif not self._explicit and self._ended and not (step.backwards or step.forward):
            # Nothing was done with what it has drawn; it may yet be, if it was drawn ahead.
            if not self._aside:
                self._set_aside(_BEGUN)
            self._forget()

    def left(self, iterator: int, *, for_sure: bool) -> None:
        """A loop over a loader was left early, some time ago: what comes now is between loops.

        Args:
            iterator: What that loop drew from.
            for_sure: It is gone. Else the script holds it by a name, so that it may draw again.
        """
        recorder, step, drawn = self.recorder, self._step, self._drawn
        if not recorder.idle():
            return
        if not for_sure:
            if drawn.iterators == [iterator] and len(drawn.sources) < 2 and not self._is_used():
                self._forget()
            return
        once = drawn.drew_once(iterator)
        if step.evaluated or step.for_evaluation:
            # The batch that was evaluated last.
            _, ahead = drawn.use()
            recorder.samples += ahead
        mine = drawn.iterators == [iterator] if drawn.iterators else iterator in drawn.sources
        unused = drawn.leave(iterator)
        if recorder.is_open:
            recorder.samples -= unused
        if not mine or self._explicit:
            return
        if self._aside == _STEPPED:
            self._release()
            self._forget()
        elif self._aside == _EVALUATED:
            self._release()
        elif self._aside == _UNSEEN:
            self._release(VALIDATE)
        if not recorder.is_open:
            return
        if step.stepped:
            if once:
                return  # a loop that makes an iterator for every batch: what that takes is the step's
            self._closer = step.last_optimizer
            self._close_train(last=True)
        elif step.evaluated or (self._unseen and step.for_evaluation and not step.backwards):
            self._close_validate(last=True)
        elif step.backwards and not step.zeroed:
            self._set_aside(_PENDING, at_last=True)
            self._forget()
        elif not step.backwards:
            self._forget()

    def pass_begins(self) -> None:
        """A loader is about to be drawn from. Where the step has drawn all that it needs, that was left."""
        drawn = self._drawn
        complete = bool(drawn.iterators) and tuple(drawn.iterators) == drawn.sources
        if complete and self.recorder.idle() and not self._is_used() and not self._explicit:
            self._forget()

    def _is_used(self) -> bool:
        step = self._step
        return bool(step.stepped or step.backwards or step.evaluated or step.for_evaluation or self._aside)

    # The model.

    def forward_begin(
        self, gradients: bool, *, evaluation_mode: bool = True, backward_may_follow: bool = False
    ) -> None:
        """The model is called.

        Args:
            gradients: It is in training mode, and gradients are computed.
            evaluation_mode: If not ``gradients``: it is in evaluation mode.
            backward_may_follow: If not ``gradients``: they are computed nevertheless.
        """
        recorder, step = self.recorder, self._step
        if recorder.idle():
            if self._explicit and (step.stepped or step.backwards):
                pass  # the script says where steps end
            elif gradients or (evaluation_mode and backward_may_follow and self._trains_in_eval_mode):
                self._train_forward()
            elif evaluation_mode:
                self._evaluation()
                self._step.forward |= backward_may_follow
            else:
                self._forward_without_gradients()
        recorder.enter(FORWARD)

    def _forward_without_gradients(self) -> None:
        """The model is called in training mode, without gradients.

        An agent acts, or a generator is sampled from; or the script evaluates and has not said so.
        """
        step = self._step
        if step.drew:
            if not (step.stepped or step.backwards):
                self._see_evaluation()
        elif not self.has_stepped:
            self._acts = True  # there was nothing to evaluate yet
        elif self._closer and not self._acts:
            self._evaluation()

    def _train_forward(self) -> None:
        step = self._step
        if step.evaluated and not step.drew:
            # The loop that draws nothing trains again.
            if self._aside == _EVALUATED:
                if self._aside_step.last_optimizer != self._closer or not self._closer:
                    self._step.forward = True
                    return  # unless this was in the middle of its batch: the next optimizer will tell
                self._release()
            self._close_validate()
        if self._aside in (_UNSEEN, _BEGUN):
            self._rejoin()
        elif step.stepped and self._may_have_ended():
            self._set_aside(_STEPPED)
        self._step.forward = True

    def _evaluation(self) -> None:
        """The model is called in evaluation mode."""
        step = self._step
        if step.drew:
            if step.stepped:
                # A loop that validates without drawing: the training step ended long ago. Unless a
                # backward follows: then this was part of it, as the samples of a GAN are.
                self._set_aside(_EVALUATED)
            elif step.backwards:
                self._set_aside(_PENDING)
            self._see_evaluation()
            return
        if self._aside == _STEPPED:
            if self._closer not in (_UNKNOWN, self._aside_step.last_optimizer) or not self._model_trains:
                return  # between two optimizers of one step; or an agent that acts
            self._rejoin()
            self._close_train()
        elif step.evaluated:
            if self._aside == _EVALUATED:
                self._release()
            self._close_validate()
        elif not self._model_trains:
            return
        elif self.recorder.is_open and not self._aside:
            # The step that has begun goes on after the validation.
            self._set_aside(_PENDING if step.backwards else _BEGUN)
        self._step.evaluated = True

    def _see_evaluation(self) -> None:
        """A batch is evaluated."""
        if self._aside == _UNSEEN:
            self._rejoin()
        self._unseen = False
        self._seen_evaluating = self._drawn.current
        self._step.evaluated = True

    def _may_have_ended(self) -> bool:
        """Whether the optimizer that stepped is one that ends a step: then another may begin on the batch."""
        step = self._step
        if not step.drew or not step.last_optimizer:
            return False
        if step.last_optimizer == self._closer:
            return True
        if step.last_optimizer in self._round:
            return False  # the last one is yet to come
        return not self._unstepped or step.optimizer_steps >= _STEPS_OF_ONE

    def forward_end(self) -> None:
        """The model has answered; until the next event the loop computes its loss."""
        recorder = self.recorder
        recorder.exit()
        if recorder.depth == 0:
            recorder.name_gap(LOSS)

    def backward_begin(self) -> None:
        """Gradients are asked for, so this step trains whatever its forward looked like."""
        recorder = self.recorder
        self.backward_calls += 1
        if recorder.idle():
            if self._step.forward:
                self._model_trains = True
                self._trains_in_eval_mode |= self._step.evaluated
            if self._aside > _STEPPED and not (self._aside == _EVALUATED and self._aside_step.last_optimizer):
                # Where the optimizer is known that stepped, the next to step will tell.
                self._rejoin()
            elif self._step.stepped and not self._explicit and self._may_have_ended():
                self._set_aside(_STEPPED)
            step = self._step
            step.backwards += 1
            step.zeroed = False
            self._draws_ahead |= self._drawn.drew_ahead()
            if not step.stepped or self._explicit:
                self._use_batch()
        elif not self._step.closure_used and recorder.inside(OPTIMIZER) and not recorder.inside(BACKWARD):
            # A closure may go backward many times, always on the same batch.
            self._step.closure_used = True
            self._use_batch()
        self._step.evaluated = False
        recorder.enter(BACKWARD)
        if recorder.depth == 1:
            recorder.name_gap(OTHER)

    def _use_batch(self) -> None:
        """The newest batch is trained on."""
        used, samples = self._drawn.use()
        self._step.micro_batches += used
        if samples:
            self.recorder.open()
            self.recorder.samples += samples

    def backward_end(self, depth: int) -> None:
        """The gradients are there, and the phases that began above ``depth`` are over."""
        self.leave(depth)
        if self._in_backward and self.recorder.is_open and self.recorder.idle():
            # Optimizers that step from hooks on the gradients, one per parameter: one step.
            optimizer, self._in_backward = self._in_backward, _UNKNOWN
            self._step_ended(optimizer)

    def zero_begin(self) -> None:
        """Gradients are about to be zeroed."""
        step = self._step
        if self.recorder.idle():
            if step.evaluated and not step.drew and self._aside in (_NOTHING, _BEGUN):
                self._end_evaluation()
            elif self._aside == _PENDING:
                # The batch before the newest draw was not a micro-batch: its gradients go unused.
                self._unused += 1
                self._release()
            elif step.backwards and not step.stepped:
                step.zeroed = True
        self.enter(ZERO_GRAD)

    def _end_evaluation(self) -> None:
        """The loop that draws nothing trains again."""
        self._close_validate()
        if self._aside:
            self._rejoin()
            self._step.resumed = True

    # Optimizers, told apart by a number of their own.

    def optimizer_made(self, optimizer: int) -> None:
        """The script has made an optimizer, which shares no parameters with another."""
        if len(self._unstepped) < _MOST_UNSTEPPED:
            self._unstepped.add(optimizer)

    def optimizer_begin(self, optimizer: int = _UNKNOWN) -> None:
        """An optimizer step begins, or a ``GradScaler`` is asked for one."""
        recorder, step = self.recorder, self._step
        if step.evaluated and not step.drew and self._aside in (_NOTHING, _BEGUN) and recorder.idle():
            self._end_evaluation()
        elif self._aside in (_STEPPED, _EVALUATED) and optimizer in self._aside_step.optimizers:
            self._closer = self._aside_step.last_optimizer
            self._release()
        elif self._aside > _STEPPED:
            self._rejoin()
        self.optimizer_calls += 1
        self._step.closure_used = False
        recorder.enter(OPTIMIZER)
        if recorder.depth == 1:
            recorder.name_gap(OTHER)

    def optimizer_end(self, optimizer: int = _UNKNOWN, called_off: bool = False) -> None:
        """An optimizer step has ended; ``called_off`` when the scaler has refused it."""
        recorder = self.recorder
        recorder.exit()
        self._unstepped.discard(optimizer)
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
        if self._aside > _STEPPED or (self._aside and self._aside_step.drew):
            # It had begun before that was set aside: what is left of a step that has failed. Or another
            # optimizer steps on the batch.
            self._rejoin()
        self.has_stepped = True
        self._step.step(optimizer)
        if self._step.drew or self._explicit:
            return
        if optimizer == self._closer or (self._ended and self._closer == _UNKNOWN):
            if self._aside:
                self._rejoin()
            # After the end of an iterator, this is the last batch of one that was drawn ahead.
            self._close_train(last=self._ended)
        else:
            self._set_aside(_STEPPED)

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
        self._forget()
        if self._aside:
            self._discard()
        self._draws = False

    def abandon(self) -> None:
        """Forget the open step: a hook has failed. What is set aside stays so, but for a lone draw."""
        self._in_backward = _UNKNOWN
        self._forget()
        if self._aside == _UNSEEN:
            self._discard()

    def finish(self) -> None:
        """The loop is over: account for a last step that no draw has closed."""
        recorder = self.recorder
        recorder.unwind()
        # Where optimizers step unseen, inside a compiled graph, a backward is all there is.
        unseen = self.train_steps > 0 and not self.has_stepped and not self._explicit
        if self._aside == _UNSEEN:
            self._release(VALIDATE)
        elif self._aside in (_STEPPED, _EVALUATED) or (self._aside == _PENDING and unseen):
            self._release()
        elif self._aside:
            self._discard()
        step = self._step
        if recorder.is_open and (step.stepped or (unseen and step.backwards)) and not self._explicit:
            self._close_train(last=True)
        elif recorder.is_open and (
            step.evaluated or (self._unseen and step.for_evaluation and not step.backwards)
        ):
            self._close_validate(last=True)
        self._forget()

    # Edges.

    def _close_train(self, *, last: bool = False) -> None:
        recorder, step = self.recorder, self._step
        unused = self._drawn.end_step(trained=True)
        if unused:
            recorder.samples -= unused
        recorder.close(TRAIN, self.train_steps, at_last=last)
        self.micro_batches += step.count_micro_batches()
        self._count_train_step()
        self._round = frozenset(step.optimizers)
        self._step = StepState()
        if self.watcher is not None:
            self.watcher.train_edge(self.train_steps)
            # What the watcher did is our time, not the next step's.
            recorder.skip(self._present())

    def _count_train_step(self) -> None:
        if not self.train_steps:
            self.warmup_tokens = self.tokens
        self.train_steps += 1

    def _close_validate(self, *, last: bool = False) -> None:
        recorder = self.recorder
        if self._aside:
            recorder.separate()
        _, ahead = self._drawn.use()
        change = ahead - self._drawn.end_step(trained=False)
        if change:
            recorder.samples += change
        recorder.close(VALIDATE, self.validate_steps, at_last=last)
        self.validate_steps += 1
        self._step = StepState()
        if self.watcher is not None:
            self.watcher.validate_edge()
            recorder.skip(self._present())

    def _forget(self) -> None:
        """The open step is none; its batches may yet be used."""
        self._drawn.end_step(trained=False)
        self.recorder.abandon()
        self._step = StepState()

    def _set_aside(self, kind: int, *, at_last: bool = False) -> None:
        """The step may have ended here: keep what follows apart until that is known."""
        if self._aside:
            self._rejoin()
        if kind == _UNSEEN:
            self._drawn.use()
        if unused := self._drawn.end_step(trained=kind in (_STEPPED, _EVALUATED, _PENDING)):
            self.recorder.samples -= unused
        self.recorder.hold(at_last=at_last)
        self._aside = kind
        self._aside_step, self._step = self._step, StepState()

    def _rejoin(self) -> None:
        """The step had not ended where it was set aside."""
        self.recorder.rejoin()
        self._aside = _NOTHING
        self._aside_step.join(self._step)
        self._step, self._aside_step = self._aside_step, StepState()

    def _release(self, kind: int = TRAIN) -> None:
        """The step had ended where it was set aside; what followed is the next one so far."""
        self._aside = _NOTHING
        if kind == VALIDATE:
            self.recorder.release(VALIDATE, self.validate_steps)
            self.validate_steps += 1
            if self.watcher is not None:
                self.watcher.validate_edge()
            return
        self.recorder.release(TRAIN, self.train_steps)
        self.micro_batches += self._aside_step.count_micro_batches()
        self._round = frozenset(self._aside_step.optimizers)
        self._count_train_step()
        if self.watcher is not None:
            self.watcher.train_edge(self.train_steps)

    def _discard(self) -> None:
        """What is set aside belongs to no step."""
        self._aside = _NOTHING
        self.recorder.discard()
