"""Loop rules: what happens to the open step and to the held one, event by event.

A decision is a table. At its event the first rule applies whose held step and conditions match; where none
does, nothing happens. The site of the documentation shows the table on its page of phases.
"""

from collections.abc import Iterable
from typing import Final

from torchperfd.steps.loop_conditions import (
    Condition,
    another_closes,
    any_optimizer_stepped,
    closer_in_held,
    closer_is_followed,
    closer_is_known,
    draws_for_evaluation,
    drew,
    drew_all_it_needs,
    drew_beside_training,
    drew_first,
    drew_for_evaluation,
    drew_from_one_loader,
    drew_once,
    drew_to_train,
    ends_step,
    evaluated,
    evaluates_first,
    evaluates_unseen,
    evaluation_was_seen,
    has_not,
    held_by_closer,
    held_drew,
    held_optimizer_is_known,
    held_was_left,
    holds_something,
    is_between_calls,
    is_explicit,
    is_new,
    is_open,
    is_used,
    loader_ended,
    looks_like_evaluation,
    loop_draws,
    may_have_ended,
    model_acts,
    model_trains,
    resumed,
    stepped,
    stepped_in_held,
    steps_unseen,
    went_backward,
    went_forward,
    zeroed,
)
from torchperfd.steps.loop_state import (
    ASIDE,
    BEGUN,
    EVALUATED,
    HELD,
    NOTHING,
    PENDING,
    STEPPED,
    UNSEEN,
    LoopState,
)
from torchperfd.steps.step_edges import (
    Action,
    close_train,
    close_train_earlier,
    close_validate,
    close_validate_earlier,
    discard,
    forget,
    hold_aside,
    hold_begun,
    hold_evaluated,
    hold_pending,
    hold_pending_earlier,
    hold_stepped,
    hold_unseen,
    note_acting,
    note_closer,
    note_evaluated,
    note_evaluation,
    note_forward,
    note_held_closer,
    note_resumed,
    note_unseen,
    note_unused,
    note_zeroed,
    rejoin,
    release,
    release_validate,
)


class Rule:
    """One row of a decision.

    Args:
        held: What is held, one or several of ``HELD`` by number; nothing in particular when left out.
        when: Conditions, all of which must hold.
        then: What is done, in this order.
    """

    def __init__(
        self,
        held: int | Iterable[int] = (),
        *,
        when: Iterable[Condition | has_not] = (),
        then: Iterable[Action] = (),
    ) -> None:
        self.held = frozenset((held,) if isinstance(held, int) else held)
        self.when = tuple(when)
        self.then = tuple(then)

    @property
    def tests(self) -> tuple[tuple[Condition, bool], ...]:
        """The conditions, each with the answer that lets the rule apply."""
        return tuple(
            (each.condition, False) if isinstance(each, has_not) else (each, True) for each in self.when
        )


class Decision:
    """What an event does.

    Args:
        event: Its name, and of which step the rules are where there are several decisions.
        rules: The first that matches applies.
    """

    def __init__(self, event: str, *rules: Rule) -> None:
        self.event = event
        self.rules = rules
        # By what is held: searched at each event, most of which no rule matches.
        self._rows = tuple(
            tuple((rule.tests, rule.then) for rule in rules if not rule.held or held in rule.held)
            for held in range(len(HELD))
        )

    def apply(self, state: LoopState) -> None:
        """Carry out the actions of the first matching rule."""
        for tests, then in self._rows[state.held]:
            for condition, wanted in tests:
                if condition(state) is not wanted:
                    break
            else:
                for action in then:
                    action(state)
                return


DRAW_HELD: Final = Decision(
    "draw: the held step",
    # A forward or backward after the optimizer step, and no further one: it was that batch's.
    Rule(STEPPED, when=[held_drew, has_not(stepped)], then=[rejoin]),
    Rule(EVALUATED, when=[went_backward, held_drew, has_not(stepped)], then=[rejoin]),
    Rule([STEPPED, EVALUATED], then=[release]),
    Rule(BEGUN, then=[discard]),
    # The evaluation is over, and the batch was one to skip.
    Rule(ASIDE, when=[has_not(is_new)], then=[rejoin]),
    Rule(UNSEEN, when=[has_not(evaluated)], then=[note_unseen, release_validate]),
)
DRAW: Final = Decision(
    "draw",
    Rule(when=[has_not(is_open)]),
    Rule(when=[stepped, has_not(is_explicit)], then=[note_closer, close_train]),
    Rule(when=[evaluated], then=[close_validate]),
    Rule(when=[is_explicit]),
    # The first loop begins: what a phase of the script's own has timed so far is set-up.
    Rule(when=[has_not(loop_draws)], then=[forget]),
    # Its gradients are gone: whatever comes, this batch is over.
    Rule(when=[went_backward, zeroed], then=[note_unused, close_train]),
    Rule(when=[went_backward], then=[hold_pending]),
    # An evaluation with gradients, in training mode: nothing of it goes backward.
    Rule(when=[went_forward, drew_beside_training], then=[close_validate]),
    # A batch was drawn for evaluation, and no forward of it was seen.
    Rule(
        when=[looks_like_evaluation, has_not(evaluation_was_seen), evaluates_unseen],
        then=[note_unseen, close_validate],
    ),
    Rule(
        when=[looks_like_evaluation, has_not(evaluation_was_seen), holds_something],
        then=[note_unseen, close_validate],
    ),
    # The loop that trains goes on. The last batch of an evaluation that was seen was not used.
    Rule(when=[looks_like_evaluation, has_not(draws_for_evaluation), evaluation_was_seen], then=[forget]),
    Rule(when=[looks_like_evaluation, has_not(draws_for_evaluation)], then=[close_validate]),
    Rule(when=[looks_like_evaluation, has_not(evaluation_was_seen)], then=[hold_unseen]),
    Rule(when=[looks_like_evaluation]),
    # What the loop has drawn stays for later; a validation has no part in it.
    Rule(when=[draws_for_evaluation], then=[forget]),
    Rule(when=[resumed, has_not(drew)], then=[forget]),
    # An evaluation with gradients may begin here, or the batch may need another.
    Rule(NOTHING, when=[has_not(went_forward), drew_to_train], then=[hold_aside]),
)
LOADER_ENDS: Final = Decision(
    "loader ends",
    Rule(UNSEEN, when=[has_not(evaluated)], then=[note_unseen, release_validate, forget]),
    Rule(when=[drew_first], then=[forget]),
    # Nothing was done with what it has drawn; it may yet be, if it was drawn ahead.
    Rule(
        NOTHING,
        when=[has_not(is_explicit), loader_ended, has_not(went_backward), has_not(went_forward)],
        then=[hold_begun, forget],
    ),
    Rule(
        when=[has_not(is_explicit), loader_ended, has_not(went_backward), has_not(went_forward)],
        then=[forget],
    ),
)
LOADER_LEFT_HELD: Final = Decision(
    "loader left: the held step",
    Rule(STEPPED, then=[release, forget]),
    Rule(EVALUATED, then=[release]),
    Rule(UNSEEN, then=[release_validate]),
    Rule(ASIDE, when=[held_was_left], then=[discard]),
)
LOADER_LEFT: Final = Decision(
    "loader left",
    Rule(when=[has_not(is_open)]),
    # A loop that makes an iterator for every batch: what that takes is the step's.
    Rule(when=[stepped, drew_once]),
    Rule(when=[stepped], then=[note_closer, close_train_earlier]),
    Rule(when=[evaluated], then=[close_validate_earlier]),
    Rule(when=[evaluates_unseen, drew_for_evaluation, has_not(went_backward)], then=[close_validate_earlier]),
    Rule(when=[went_backward, has_not(zeroed)], then=[hold_pending_earlier, forget]),
    Rule(when=[went_forward, has_not(went_backward), drew_beside_training], then=[close_validate_earlier]),
    Rule(when=[has_not(went_backward)], then=[forget]),
)
LOADER_LEFT_PERHAPS: Final = Decision(
    "loader left, and held by a name", Rule(when=[drew_from_one_loader, has_not(is_used)], then=[forget])
)
PASS_BEGINS: Final = Decision(
    "iterator made",
    Rule(when=[drew_all_it_needs, is_between_calls, has_not(is_used), has_not(is_explicit)], then=[forget]),
)
TRAIN_FORWARD_EVALUATED: Final = Decision(
    "forward for training, after an evaluation",
    # Unless this was in the middle of its batch: the next optimizer step decides.
    Rule(EVALUATED, when=[evaluated, has_not(drew), has_not(held_by_closer)]),
    # The loop that draws nothing trains again.
    Rule(EVALUATED, when=[evaluated, has_not(drew)], then=[release, close_validate]),
    Rule(when=[evaluated, has_not(drew)], then=[close_validate]),
)
TRAIN_FORWARD: Final = Decision(
    "forward for training",
    Rule([UNSEEN, BEGUN], then=[rejoin, note_forward]),
    Rule(when=[stepped, may_have_ended], then=[hold_stepped, note_forward]),
    Rule(then=[note_forward]),
)
EVALUATION_FORWARD: Final = Decision(
    "forward in evaluation mode",
    # A loop that validates without drawing: the training step ended long ago. Unless a backward follows:
    # then this was part of it, as the samples of a GAN are.
    Rule(when=[drew, stepped], then=[hold_evaluated, note_evaluation]),
    Rule(when=[drew, went_backward], then=[hold_pending, note_evaluation]),
    Rule(UNSEEN, when=[drew], then=[rejoin, note_evaluation]),
    Rule(when=[drew], then=[note_evaluation]),
    # Between two optimizers of one step; or an agent that acts.
    Rule(STEPPED, when=[another_closes]),
    Rule(STEPPED, when=[has_not(model_trains)]),
    Rule(STEPPED, then=[rejoin, close_train, note_evaluated]),
    Rule(EVALUATED, when=[evaluated], then=[release, close_validate, note_evaluated]),
    Rule(when=[evaluated], then=[close_validate, note_evaluated]),
    Rule(when=[has_not(model_trains), has_not(evaluates_first)]),
    # The step that has begun goes on after the validation.
    Rule(NOTHING, when=[is_open, went_backward], then=[hold_pending, note_evaluated]),
    Rule(NOTHING, when=[is_open], then=[hold_begun, note_evaluated]),
    Rule(then=[note_evaluated]),
)


def evaluate_undrawn(state: LoopState) -> None:
    """The same as a forward in evaluation mode."""
    EVALUATION_FORWARD.apply(state)


ACTING_FORWARD: Final = Decision(
    "forward in training mode without gradients",
    # An agent acts, or a generator is sampled from; or the script evaluates in training mode.
    Rule(when=[drew, stepped]),
    Rule(when=[drew, went_backward]),
    Rule(UNSEEN, when=[drew], then=[rejoin, note_evaluation]),
    Rule(when=[drew], then=[note_evaluation]),
    Rule(when=[has_not(any_optimizer_stepped)], then=[note_acting]),
    Rule(when=[closer_is_known, has_not(model_acts)], then=[evaluate_undrawn]),
)
BACKWARD: Final = Decision(
    "backward",
    # If the optimizer that stepped is known, the next optimizer step decides.
    Rule(EVALUATED, when=[has_not(held_optimizer_is_known)], then=[rejoin]),
    Rule([PENDING, UNSEEN, BEGUN, ASIDE], then=[rejoin]),
    Rule(when=[stepped, has_not(is_explicit), may_have_ended], then=[hold_stepped]),
)
ZERO: Final = Decision(
    "gradients zeroed",
    # The loop that draws nothing trains again.
    Rule(NOTHING, when=[evaluated, has_not(drew)], then=[close_validate]),
    Rule(BEGUN, when=[evaluated, has_not(drew)], then=[close_validate, rejoin, note_resumed]),
    # The batch before the newest draw was not a micro-batch: its gradients go unused.
    Rule(PENDING, then=[note_unused, release]),
    Rule(when=[went_backward, has_not(stepped)], then=[note_zeroed]),
)
TRAINING_MODE: Final = Decision(
    "model put into training mode",
    # An evaluation that drew nothing is over.
    Rule(NOTHING, when=[evaluated, has_not(drew)], then=[close_validate]),
    Rule(BEGUN, when=[evaluated, has_not(drew)], then=[close_validate, rejoin, note_resumed]),
)
OPTIMIZER_BEGINS: Final = Decision(
    "optimizer begins",
    Rule(NOTHING, when=[evaluated, has_not(drew), is_between_calls], then=[close_validate]),
    Rule(
        BEGUN,
        when=[evaluated, has_not(drew), is_between_calls],
        then=[close_validate, rejoin, note_resumed],
    ),
    Rule([STEPPED, EVALUATED], when=[closer_in_held], then=[release]),
    Rule([STEPPED, EVALUATED], when=[stepped_in_held], then=[note_held_closer, release]),
    Rule([EVALUATED, PENDING, UNSEEN, BEGUN, ASIDE], then=[rejoin]),
)
OPTIMIZER_ENDS_HELD: Final = Decision(
    "optimizer ends: the held step",
    # It had begun before that was held: what is left of a step that has failed.
    Rule([EVALUATED, PENDING, UNSEEN, BEGUN, ASIDE], then=[rejoin]),
    # Another optimizer steps on the batch.
    Rule(STEPPED, when=[held_drew], then=[rejoin]),
)
OPTIMIZER_ENDS: Final = Decision(
    "optimizer ends",
    Rule(when=[drew]),
    Rule(when=[is_explicit]),
    # After the end of an iterator, this is the last batch of one that was drawn ahead.
    Rule(STEPPED, when=[ends_step, loader_ended], then=[rejoin, close_train_earlier]),
    Rule(when=[ends_step, has_not(loader_ended), closer_is_followed], then=[hold_stepped]),
    Rule(STEPPED, when=[ends_step], then=[rejoin, close_train]),
    Rule(when=[ends_step, loader_ended], then=[close_train_earlier]),
    Rule(when=[ends_step], then=[close_train]),
    Rule(then=[hold_stepped]),
)
CLIENT_STEP: Final = Decision("client.step()", Rule(when=[holds_something], then=[rejoin]))
THREAD_CHANGES: Final = Decision(
    "another thread trains", Rule(NOTHING, then=[forget]), Rule(then=[forget, discard])
)
HOOK_FAILS: Final = Decision("a hook has failed", Rule(UNSEEN, then=[forget, discard]), Rule(then=[forget]))
LOOP_ENDS_HELD: Final = Decision(
    "loop ends: the held step",
    # Its loader may never end, so that the newest draw is that of another evaluation.
    Rule(UNSEEN, then=[note_unseen, release_validate]),
    Rule([STEPPED, EVALUATED], then=[release]),
    Rule(PENDING, when=[steps_unseen], then=[release]),
    Rule([PENDING, BEGUN, ASIDE], then=[discard]),
)
LOOP_ENDS: Final = Decision(
    "loop ends",
    Rule(when=[is_open, stepped, has_not(is_explicit)], then=[close_train_earlier, forget]),
    Rule(when=[is_open, steps_unseen, went_backward], then=[close_train_earlier, forget]),
    Rule(when=[is_open, evaluated], then=[close_validate_earlier, forget]),
    Rule(
        when=[is_open, evaluates_unseen, drew_for_evaluation, has_not(went_backward)],
        then=[close_validate_earlier, forget],
    ),
    Rule(then=[forget]),
)

DECISIONS: Final = (
    *(DRAW_HELD, DRAW, LOADER_ENDS, LOADER_LEFT_HELD, LOADER_LEFT, LOADER_LEFT_PERHAPS, PASS_BEGINS),
    *(TRAIN_FORWARD_EVALUATED, TRAIN_FORWARD, EVALUATION_FORWARD, ACTING_FORWARD, BACKWARD, ZERO),
    TRAINING_MODE,
    *(OPTIMIZER_BEGINS, OPTIMIZER_ENDS_HELD, OPTIMIZER_ENDS, CLIENT_STEP),
    *(THREAD_CHANGES, HOOK_FAILS, LOOP_ENDS_HELD, LOOP_ENDS),
)
"""All of them, in the order of the documentation."""
