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
step has so far is held, and rejoins what follows or is a step of its own.

This module notes what happened and keeps the phases; what an event does to the
steps is decided by the rules of :mod:`torchperfd.steps.loop_rules`. All methods are called
by the reader of the events, one by one, under its lock.
"""

from typing import Final

from torchperfd.steps import loop_rules
from torchperfd.steps.loop_conditions import drew_beside_training
from torchperfd.steps.loop_state import UNKNOWN, LoopState
from torchperfd.steps.phases import (
    AFTER_EVALUATION,
    BACKWARD,
    CHECKPOINT,
    DATA,
    FORWARD,
    LOSS,
    OPTIMIZER,
    OTHER,
    ZERO_GRAD,
)
from torchperfd.steps.step_edges import close_train

_MAX_UNSTEPPED: Final = 16


class Loop(LoopState):
    """Follows one training loop."""

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
            # step() raised, so its post hook never ran; the hook marks draws inside a closure.
            recorder.unwind()
        if recorder.depth and recorder.inside(DATA):
            # A data set that reads from a loader, or a prefetcher around one: the outer draw is the loop's.
            recorder.enter(DATA)
            return
        # Where batches are drawn ahead, a model may be back in training mode only after the draw.
        has_trained = self.train_steps > 0 or self.step.stepped
        self.iterator = iterator
        self.draws_for_evaluation = not gradients or (
            evaluation_mode and has_trained and not self.draws_ahead
        )
        if recorder.idle():
            loop_rules.DRAW_HELD.apply(self)
            loop_rules.DRAW.apply(self)
        self.draws = True
        self.loader_ended = False
        self.inner_samples = 0
        self.first_draw = not self.step.drew
        self.step.begin_draw(self.draws_for_evaluation)
        self.drawn.begin(iterator)
        recorder.enter(DATA)

    def closure_draw_begin(self) -> None:
        """The closure of an optimizer that is at work asks for a batch: no edge can be here."""
        self.first_draw = False
        self.inner_samples = 0
        self.recorder.enter(DATA)

    def draw_end(self, samples: int) -> None:
        """The batch is here. Of draws within one another the outermost counts, if it knows its samples."""
        recorder = self.recorder
        recorder.exit()
        if recorder.depth and recorder.inside(DATA):
            self.inner_samples += samples
            return
        samples = samples or self.inner_samples
        self.uncounted = not samples
        recorder.samples += samples
        self.step.batches += 1
        if not (recorder.depth and recorder.inside(OPTIMIZER)):
            self.drawn.add(samples)

    def count(self, samples: int) -> None:
        """Count the samples of the newest batch that a framework drew, unless they are counted."""
        if samples and self.uncounted:
            self.uncounted = False
            self.recorder.samples += samples
            self.drawn.count(samples)

    def draw_stop(self, iterator: int = 0) -> None:
        """The loader is exhausted: what comes now is between loops.

        Unless the step has drawn before, from another loader: then this was a second one that starts over.
        """
        self.recorder.exit()
        if not self.recorder.idle():
            return
        self.drawn.exhausted(iterator)
        self.loader_ended = self.first_draw or self.drawn.iterators == [iterator]
        loop_rules.LOADER_ENDS.apply(self)

    def left(self, iterator: int, *, for_sure: bool) -> None:
        """A loop over a loader was left early, some time ago: what comes now is between loops.

        Args:
            iterator: What that loop drew from.
            for_sure: It is gone. Else the script holds it by a name, so that it may draw again.
        """
        recorder, step, drawn = self.recorder, self.step, self.drawn
        if not recorder.idle():
            return
        self.iterator = iterator
        if not for_sure:
            loop_rules.LOADER_LEFT_PERHAPS.apply(self)
            return
        self.drew_once = drawn.drew_once(iterator)
        evaluated = step.evaluated or step.for_evaluation
        if evaluated or (step.forward and not step.backwards and drew_beside_training(self)):
            # The batch that was evaluated last.
            recorder.samples += drawn.use_for_validation()
        mine = drawn.iterators == [iterator] if drawn.iterators else iterator in drawn.sources
        unused = drawn.leave(iterator)
        if recorder.is_open:
            recorder.samples -= unused
        if mine and not self.explicit:
            loop_rules.LOADER_LEFT_HELD.apply(self)
            loop_rules.LOADER_LEFT.apply(self)

    def pass_begins(self) -> None:
        """A loader is about to be drawn from. Where the step has drawn all that it needs, that was left."""
        loop_rules.PASS_BEGINS.apply(self)

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
        if gradients or backward_may_follow:
            self.evaluating = False
        if self.recorder.idle():
            if self.explicit and (self.step.stepped or self.step.backwards):
                pass  # the script ends steps itself
            elif gradients or (evaluation_mode and backward_may_follow and self.trains_in_eval_mode):
                loop_rules.TRAIN_FORWARD_EVALUATED.apply(self)
                loop_rules.TRAIN_FORWARD.apply(self)
            elif evaluation_mode:
                loop_rules.EVALUATION_FORWARD.apply(self)
                self.step.forward |= backward_may_follow
            else:
                loop_rules.ACTING_FORWARD.apply(self)
        if not self.recorder.depth:
            self.loss_follows = gradients or backward_may_follow
        self.recorder.enter(FORWARD)

    def forward_end(self) -> None:
        """The model has answered; until the next event the loop computes its loss, unless the model acted."""
        recorder = self.recorder
        recorder.exit()
        if recorder.depth == 0:
            if self.loss_follows:
                recorder.name_gap(LOSS)
            elif recorder.gap != LOSS:  # else a loss is being computed, to which this forward contributes
                recorder.name_gap(AFTER_EVALUATION)
            self.loss_follows = False
            self._pause()

    def backward_begin(self) -> None:
        """Gradients are asked for, so this step trains whatever its forward looked like."""
        recorder = self.recorder
        recorder.leave_in()
        self.evaluating = False
        self.backward_calls += 1
        if recorder.idle():
            if self.step.forward:
                self.model_trains = True
                self.trains_in_eval_mode |= self.step.evaluated
            loop_rules.BACKWARD.apply(self)
            step = self.step
            step.backwards += 1
            step.zeroed = False
            self.draws_ahead |= self.drawn.drew_ahead()
            if not step.stepped or self.explicit:
                self._use_batch()
        elif not self.step.closure_used and recorder.inside(OPTIMIZER) and not recorder.inside(BACKWARD):
            # A closure may go backward many times, always on the same batch.
            self.step.closure_used = True
            self._use_batch()
        self.step.evaluated = False
        recorder.enter(BACKWARD)
        if recorder.depth == 1:
            recorder.name_gap(OTHER)

    def _use_batch(self) -> None:
        used, samples = self.drawn.use()
        self.step.micro_batches += used
        if samples:
            self.recorder.open()
            self.recorder.samples += samples

    def backward_end(self, depth: int) -> None:
        """The gradients are there, and the phases that began above ``depth`` are over."""
        self.leave(depth)
        if self.in_backward and self.recorder.is_open and self.recorder.idle():
            # Optimizers that step from hooks on the gradients, one per parameter: one step.
            optimizer, self.in_backward = self.in_backward, UNKNOWN
            self._step_ended(optimizer)

    def zero_begin(self) -> None:
        if self.recorder.idle():
            loop_rules.ZERO.apply(self)
        self.enter(ZERO_GRAD)

    def evaluation_mode(self) -> None:
        """A model that is trained is put into evaluation mode: what follows is no part of a training step.

        That lasts until it is put back, or trains in this mode. A batch that is not trained on yet goes on.
        """
        if not self.explicit and not self.trains_in_eval_mode:
            self.evaluating = True
            self._pause()

    def training_mode(self) -> None:
        self.recorder.resume()
        if self.evaluating and self.recorder.idle():
            loop_rules.TRAINING_MODE.apply(self)
        self.evaluating = False

    def _pause(self) -> None:
        """Time is no step's from here on while a model evaluates, but for the phases that begin."""
        step = self.step
        if not self.evaluating or not self.recorder.idle():
            return
        # A batch that was not trained on yet may be trained on after this.
        if (step.stepped or not step.drew) and not step.evaluated and not step.for_evaluation:
            self.recorder.pause()

    # Optimizers, each with a number of its own.

    def optimizer_made(self, optimizer: int) -> None:
        """The script has made an optimizer, which shares no parameters with another."""
        if len(self.unstepped) < _MAX_UNSTEPPED:
            self.unstepped.add(optimizer)

    def optimizer_begin(self, optimizer: int = UNKNOWN) -> None:
        """An optimizer step begins, or a ``GradScaler`` is asked for one."""
        recorder = self.recorder
        self.optimizer = optimizer
        recorder.leave_in()
        loop_rules.OPTIMIZER_BEGINS.apply(self)
        self.optimizer_calls += 1
        self.step.closure_used = False
        recorder.enter(OPTIMIZER)
        if recorder.depth == 1:
            recorder.name_gap(OTHER)

    def optimizer_end(self, optimizer: int = UNKNOWN, called_off: bool = False) -> None:
        """An optimizer step has ended; ``called_off`` when the scaler has refused it."""
        recorder = self.recorder
        recorder.exit()
        self.unstepped.discard(optimizer)
        # Not open: a hook has failed since this optimizer step began, and the step was abandoned.
        if not recorder.is_open:
            return
        if recorder.idle():
            self.refused += called_off
            self._step_ended(optimizer)
        elif self.in_backward == UNKNOWN and not recorder.inside(OPTIMIZER):
            self.in_backward = optimizer

    def stepped_elsewhere(self, optimizer: int) -> None:
        """An optimizer stepped on one of autograd's own threads, as it does for other devices."""
        if self.in_backward == UNKNOWN and self.recorder.depth and self.recorder.inside(BACKWARD):
            self.in_backward = optimizer

    def _step_ended(self, optimizer: int) -> None:
        self.optimizer = optimizer
        loop_rules.OPTIMIZER_ENDS_HELD.apply(self)
        self.has_stepped = True
        step = self.step
        if not (step.stepped or step.backwards or step.closure_used):
            self._use_batch()  # its gradients were computed out of sight, as torch.func does
        if optimizer and optimizer == step.last_optimizer and step.drew and self.unstepped:
            # Were it known that the others take no part, this would be a step of its own.
            step.repeats += optimizer != self.closer and optimizer not in self.newest_optimizers
        step.step(optimizer)
        loop_rules.OPTIMIZER_ENDS.apply(self)

    # Calls of client.step(), and checkpoints.

    def enter(self, phase: int) -> None:
        """Any other phase begins: the zeroing of gradients, or one of the script's own.

        It may lie within a step, between two loops, or around a whole one.
        """
        if self.draws:
            self.recorder.push(phase)
        else:
            self.recorder.enter(phase)

    def exit(self) -> None:
        """Whatever began last ends."""
        self.recorder.exit()
        self._pause()

    def leave(self, depth: int) -> None:
        """Whatever began above ``depth`` ends: one phase, and those whose other half never came."""
        recorder = self.recorder
        while recorder.depth > depth:
            recorder.exit()
        self._pause()

    def save_begin(self) -> None:
        """A checkpoint is about to be written: a phase of the step, or between two."""
        if self.recorder.is_open:
            self.recorder.enter(CHECKPOINT)
        elif not self._saving_since:
            self._saving_since = self.clock.now
        self.saving += 1

    def save_end(self, depth: int) -> None:
        self.leave(depth)
        self.saving -= 1
        if self._saving_since and not self.saving:
            self.saves.count(self.clock.now - self._saving_since)
            self._saving_since = 0

    def client_step(self, samples: int) -> None:
        """End a training step, by client.step(); from now on only these calls end steps."""
        self.explicit = True
        self.evaluating = False
        self.recorder.leave_in()
        loop_rules.CLIENT_STEP.apply(self)
        self.recorder.open()
        self.recorder.samples += samples
        close_train(self)

    # The loop as a whole.

    def adopt(self) -> None:
        """Another thread's loop is followed from now on; nothing of this one's has trained."""
        self.recorder.unwind()
        loop_rules.THREAD_CHANGES.apply(self)
        self.draws = self.evaluating = False

    def abandon(self) -> None:
        """Forget the open step: a hook has failed. What is held stays so, but for a lone draw."""
        self.in_backward = UNKNOWN
        self.evaluating = False
        loop_rules.HOOK_FAILS.apply(self)

    def finish(self) -> None:
        """The loop is over: account for a last step that no draw has closed."""
        self.recorder.unwind()
        loop_rules.LOOP_ENDS_HELD.apply(self)
        loop_rules.LOOP_ENDS.apply(self)
