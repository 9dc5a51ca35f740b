"""Edges: what rules do with the open step and with the held one."""

from collections.abc import Callable
from typing import Final

from torchperfd.steps.loop_state import (
    ASIDE,
    BEGUN,
    EVALUATED,
    HELD,
    NOTHING,
    PENDING,
    STEPPED,
    UNKNOWN,
    UNSEEN,
    LoopState,
    StepState,
)
from torchperfd.steps.phases import TRAIN, VALIDATE

Action = Callable[[LoopState], None]


def close_train(state: LoopState) -> None:
    """A training step ends here."""
    _close_train(state, at_last=False)


def close_train_earlier(state: LoopState) -> None:
    """A training step has ended at its last event; what came since belongs to no step."""
    _close_train(state, at_last=True)


def _close_train(state: LoopState, *, at_last: bool) -> None:
    recorder, step = state.recorder, state.step
    unused = state.drawn.end_step(trained=True)
    if unused:
        recorder.samples -= unused
    steps = step.count_steps()
    recorder.close(TRAIN, state.train_steps, count=steps, at_last=at_last)
    _count_train_steps(state, step, steps)
    state.step = StepState()
    if state.watcher is not None:
        state.watcher.train_edge(state.train_steps)
        # What the watcher did is our time, not the next step's.
        recorder.skip(state.present())


def _count_train_steps(state: LoopState, step: StepState, steps: int) -> None:
    if not state.train_steps:
        state.warmup_tokens = state.tokens
    state.train_steps += steps
    state.micro_batches += max(steps, step.count_micro_batches())
    state.newest_optimizers = frozenset(step.optimizers)
    if step.last_optimizer != UNKNOWN and step.last_optimizer == state.closer:
        if len(step.optimizers) == 1:
            state.closes_alone = True
        elif state.closes_alone and not step.drew:
            state.followers |= state.newest_optimizers - {state.closer}


def close_validate(state: LoopState) -> None:
    """A validation step ends here."""
    _close_validate(state, at_last=False)


def close_validate_earlier(state: LoopState) -> None:
    """A validation step has ended at its last event; what came since belongs to no step."""
    _close_validate(state, at_last=True)


def _close_validate(state: LoopState, *, at_last: bool) -> None:
    recorder = state.recorder
    if state.held:
        recorder.separate()
    change = state.drawn.use_for_validation() - state.drawn.end_step(trained=False)
    if change:
        recorder.samples += change
    recorder.close(VALIDATE, state.validate_steps, at_last=at_last)
    state.validate_steps += 1
    state.step = StepState()
    if state.watcher is not None:
        state.watcher.validate_edge()
        recorder.skip(state.present())


def forget(state: LoopState) -> None:
    """The open step is none; its batches may yet be used."""
    state.drawn.end_step(trained=False)
    state.recorder.abandon()
    state.step = StepState()


def _holding(kind: int, *, earlier: bool = False) -> Action:
    """Return the action that holds the open step, which ends now or at its last event."""

    def hold(state: LoopState) -> None:
        _hold(state, kind, at_last=earlier)

    hold.__name__ = f"hold_{HELD[kind]}{'_earlier' if earlier else ''}"
    return hold


hold_stepped: Final = _holding(STEPPED)
"""The step ended here unless another optimizer steps."""
hold_evaluated: Final = _holding(EVALUATED)
"""The step ended here unless its batch goes on after a forward without gradients."""
hold_pending: Final = _holding(PENDING)
"""The batch has gradients that may yet be used."""
hold_pending_earlier: Final = _holding(PENDING, earlier=True)
"""The same, and what came since its last event belongs to no step."""
hold_unseen: Final = _holding(UNSEEN)
"""The draw for evaluation may have been made ahead of its forward."""
hold_begun: Final = _holding(BEGUN)
"""Keep the step, which has begun, open while the loop does something else."""
hold_aside: Final = _holding(ASIDE)
"""Keep the batch for training while another iterator is drawn from."""


def _hold(state: LoopState, kind: int, *, at_last: bool = False) -> None:
    if state.held:
        rejoin(state)
    if kind == UNSEEN:
        state.drawn.use_for_validation()
    if kind == ASIDE:
        state.drawn.set_aside()
    elif unused := state.drawn.end_step(trained=kind in (STEPPED, EVALUATED, PENDING)):
        state.recorder.samples -= unused
    state.recorder.hold(at_last=at_last)
    state.held = kind
    state.held_step, state.step = state.step, StepState()


def rejoin(state: LoopState) -> None:
    """The step had not ended where it was held."""
    if state.held == ASIDE:
        state.drawn.take_back()
    state.recorder.rejoin()
    state.held = NOTHING
    state.held_step.join(state.step)
    state.step, state.held_step = state.held_step, StepState()


def release(state: LoopState) -> None:
    """The held step is a training step; what followed is the next one so far."""
    state.held = NOTHING
    held = state.held_step
    repeated = state.optimizer != UNKNOWN and state.optimizer == held.last_optimizer
    steps = held.count_steps(ends_with_repeat=repeated)
    state.recorder.release(TRAIN, state.train_steps, count=steps)
    _count_train_steps(state, held, steps)
    if state.watcher is not None:
        state.watcher.train_edge(state.train_steps)


def release_validate(state: LoopState) -> None:
    """The held step is a validation step."""
    state.held = NOTHING
    state.recorder.release(VALIDATE, state.validate_steps)
    state.validate_steps += 1
    if state.watcher is not None:
        state.watcher.validate_edge()


def discard(state: LoopState) -> None:
    """What is held belongs to no step."""
    state.held = NOTHING
    state.drawn.forget_aside()
    state.recorder.discard()


# What is noted.


def note_closer(state: LoopState) -> None:
    """The optimizer that stepped last in the open step ends steps from now on."""
    _note_closer(state, state.step.last_optimizer)


def note_held_closer(state: LoopState) -> None:
    """The optimizer that stepped last in the held step ends steps from now on."""
    _note_closer(state, state.held_step.last_optimizer)


def _note_closer(state: LoopState, optimizer: int) -> None:
    if optimizer != state.closer:
        state.closer, state.closes_alone, state.followers = optimizer, False, frozenset()


def note_unused(state: LoopState) -> None:
    """The gradients of a batch went unused."""
    state.unused += 1


def note_unseen(state: LoopState) -> None:
    """Draws are all that is to be seen of this loop's evaluation."""
    state.evaluates_unseen = True


def note_evaluation(state: LoopState) -> None:
    """A batch is seen to be evaluated."""
    state.evaluates_unseen = False
    state.seen_evaluating = state.drawn.current
    state.step.evaluated = True


def note_evaluated(state: LoopState) -> None:
    """The open step is an evaluation."""
    state.step.evaluated = True


def note_forward(state: LoopState) -> None:
    """The open step has a forward with gradients."""
    state.step.forward = True


def note_zeroed(state: LoopState) -> None:
    """The gradients of the newest backward are zeroed."""
    state.step.zeroed = True


def note_resumed(state: LoopState) -> None:
    """The open step began before the validation that has ended."""
    state.step.resumed = True


def note_acting(state: LoopState) -> None:
    """The model acts: there was nothing to evaluate yet."""
    state.acts = True
