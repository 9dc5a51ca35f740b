"""Conditions on a loop's state, by which rules choose what happens at an event.

The open step is the subject where the name has none: ``went_backward`` is true where the open step has.
"""

from collections.abc import Callable
from typing import Final

from torchperfd.steps.loop_state import NOTHING, UNKNOWN, LoopState

Condition = Callable[[LoopState], bool]

# After so many steps of one optimizer on one batch, others that have never stepped take no part in it.
_STEPS_OF_ONE: Final = 8


class has_not:  # noqa: N801 - read as a word in rules
    """The opposite of a condition, named after it."""

    def __init__(self, condition: Condition) -> None:
        self.condition = condition
        name = condition.__name__
        self.__name__ = f"is not {name[3:]}" if name.startswith("is_") else f"not {name}"


# The open step.


def is_open(state: LoopState) -> bool:
    """Anything was timed since the last edge."""
    return state.recorder.is_open


def is_between_calls(state: LoopState) -> bool:
    """No phase is under way."""
    return state.recorder.idle()


def drew(state: LoopState) -> bool:
    """A loader was asked for a batch."""
    return state.step.drew


def drew_first(state: LoopState) -> bool:
    """The newest draw is the step's first."""
    return state.first_draw


def drew_for_evaluation(state: LoopState) -> bool:
    """All its draws looked like evaluation."""
    return state.step.for_evaluation


def went_forward(state: LoopState) -> bool:
    """The model was called with gradients."""
    return state.step.forward


def went_backward(state: LoopState) -> bool:
    """There was a backward."""
    return state.step.backwards > 0


def zeroed(state: LoopState) -> bool:
    """Gradients were zeroed after its newest backward."""
    return state.step.zeroed


def stepped(state: LoopState) -> bool:
    """An optimizer stepped, or was to."""
    return state.step.stepped


def evaluated(state: LoopState) -> bool:
    """It looks like a validation step."""
    return state.step.evaluated


def resumed(state: LoopState) -> bool:
    """It began before the validation that ended last."""
    return state.step.resumed


def may_have_ended(state: LoopState) -> bool:
    """The optimizer that stepped last is one that ends a step: another may begin on the batch."""
    step = state.step
    if not step.drew or not step.last_optimizer:
        return False
    if step.last_optimizer == state.closer:
        return True
    if step.last_optimizer in state.newest_optimizers:
        return False  # the last one is yet to come
    return not state.unstepped or step.optimizer_steps >= _STEPS_OF_ONE


def drew_beside_training(state: LoopState) -> bool:
    """Its batches come from iterators that never trained, and the loop that trains is another."""
    return state.drawn.drew_beside_training(state.iterator, draws_ahead=state.draws_ahead)


def drew_to_train(state: LoopState) -> bool:
    """It has all that the training step before it drew, and the draw that begins is from another iterator."""
    drawn = state.drawn
    return drew_all_it_needs(state) and all(map(drawn.trained.get, drawn.iterators)) and is_new(state)


def is_new(state: LoopState) -> bool:
    """The iterator of the event never trained, as far as is known."""
    return state.iterator not in state.drawn.trained


def is_used(state: LoopState) -> bool:
    """Anything was done with its batches, or a step is held."""
    step = state.step
    return bool(step.stepped or step.backwards or step.evaluated or step.for_evaluation or state.held)


def drew_from_one_loader(state: LoopState) -> bool:
    """Its batches come from the iterator of the event, and those of the step before from one."""
    return state.drawn.iterators == [state.iterator] and len(state.drawn.sources) < 2


def drew_all_it_needs(state: LoopState) -> bool:
    """It has drawn from the same iterators as the training step before it."""
    drawn = state.drawn
    return bool(drawn.iterators) and tuple(drawn.iterators) == drawn.sources


# The held step.


def held_drew(state: LoopState) -> bool:
    """The held step asked a loader for a batch."""
    return state.held_step.drew


def held_optimizer_is_known(state: LoopState) -> bool:
    """It is known which optimizer stepped in the held step."""
    return state.held_step.last_optimizer != UNKNOWN


def held_by_closer(state: LoopState) -> bool:
    """The optimizer that steps last in a step has stepped in the held one."""
    return state.closer != UNKNOWN and state.held_step.last_optimizer == state.closer


def another_closes(state: LoopState) -> bool:
    """Another optimizer than that of the held step is known to step last."""
    return state.closer not in (UNKNOWN, state.held_step.last_optimizer)


def held_was_left(state: LoopState) -> bool:
    """The held step drew from the iterator of the event."""
    return state.drawn.is_aside(state.iterator)


def closer_in_held(state: LoopState) -> bool:
    """The optimizer of the event is the one that ends steps, and has stepped in the held one."""
    return state.optimizer == state.closer and stepped_in_held(state)


def stepped_in_held(state: LoopState) -> bool:
    """The optimizer of the event has stepped in the held step already."""
    return state.optimizer in state.held_step.optimizers


# The loop.


def is_explicit(state: LoopState) -> bool:
    """The script ends steps itself, by client.step()."""
    return state.explicit


def loop_draws(state: LoopState) -> bool:
    """The loop has drawn before."""
    return state.draws


def loader_ended(state: LoopState) -> bool:
    """The iterator that the loop drew from last is exhausted."""
    return state.loader_ended


def any_optimizer_stepped(state: LoopState) -> bool:
    """An optimizer has ever stepped."""
    return state.has_stepped


def steps_unseen(state: LoopState) -> bool:
    """Steps have ended without an optimizer, which steps inside a compiled graph."""
    return state.train_steps > 0 and not state.has_stepped and not state.explicit


def closer_is_known(state: LoopState) -> bool:
    """It is known which optimizer steps last in a step."""
    return state.closer != UNKNOWN


def closer_is_followed(state: LoopState) -> bool:
    """At times another optimizer steps after the one that ends steps, as that of a delayed policy."""
    return bool(state.followers)


def model_trains(state: LoopState) -> bool:
    """A backward has followed a forward of the model."""
    return state.model_trains


def model_acts(state: LoopState) -> bool:
    """The model was called without gradients before it ever trained."""
    return state.acts


def evaluates_first(state: LoopState) -> bool:
    """A model was put into evaluation mode before any training."""
    return state.evaluating and not state.has_stepped


def evaluation_was_seen(state: LoopState) -> bool:
    """A batch of this iterator was seen to be evaluated."""
    return state.seen_evaluating == state.drawn.current


def evaluates_unseen(state: LoopState) -> bool:
    """Draws are all that is to be seen of this loop's evaluation."""
    return state.evaluates_unseen


# The event.


def draws_for_evaluation(state: LoopState) -> bool:
    """The draw that begins looks like one for evaluation."""
    return state.draws_for_evaluation


def looks_like_evaluation(state: LoopState) -> bool:
    """The step's draws do; or the one that begins does, from the step's only iterator."""
    return state.step.for_evaluation or (
        # The first batch may have been drawn ahead of the evaluation, to look at.
        state.draws_for_evaluation and state.drawn.iterators == [state.iterator]
    )


def drew_once(state: LoopState) -> bool:
    """The iterator that was left gave one batch only."""
    return state.drew_once


def ends_step(state: LoopState) -> bool:
    """The optimizer of the event steps last in a step; after a loader's end, any does."""
    return state.optimizer == state.closer or (state.loader_ended and state.closer == UNKNOWN)


def holds_something(state: LoopState) -> bool:
    """A step is held."""
    return state.held != NOTHING
