"""Loop state: everything that decides what an event means, for the loop and for one step of it."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Final, Protocol

from torchperfd.model.totals import PhaseTotals
from torchperfd.steps.drawn_batches import DrawnBatches
from torchperfd.steps.phase_stack import Clock
from torchperfd.steps.recorder import Recorder


@dataclass(slots=True, eq=False, repr=False)
class StepState:
    """What has happened in a step so far.

    Attributes:
        for_evaluation: Whether every one of its draws looked like evaluation.
        stepped: Whether an optimizer stepped, or was to.
        forward: Whether a forward with gradients was seen.
        zeroed: Whether gradients were zeroed after the newest backward.
        resumed: Whether it began before the validation that ended last.
        closure_used: Whether the closure of the optimizer that steps, or stepped last, has gone backward.
        micro_batches: Backward passes that used a new batch.
        repeats: Those of them that are steps of their own, unless one that never stepped takes part.
        last_optimizer: The one that stepped last, 0 for none.
    """

    drew: bool = False
    for_evaluation: bool = False
    stepped: bool = False
    evaluated: bool = False
    forward: bool = False
    zeroed: bool = False
    resumed: bool = False
    closure_used: bool = False
    batches: int = 0
    backwards: int = 0
    micro_batches: int = 0
    optimizer_steps: int = 0
    repeats: int = 0
    last_optimizer: int = 0
    optimizers: set[int] = field(default_factory=set)

    def key(self) -> tuple[object, ...]:
        return (*_ALL_BUT_OPTIMIZERS(self), frozenset(self.optimizers))

    def begin_draw(self, for_evaluation: bool) -> None:
        self.for_evaluation = for_evaluation and (self.for_evaluation or not self.drew)
        self.drew = True

    def step(self, optimizer: int) -> None:
        self.stepped = True
        self.evaluated = False
        self.optimizer_steps += 1
        self.last_optimizer = optimizer
        if optimizer:
            self.optimizers.add(optimizer)

    def join(self, later: "StepState") -> None:
        """What was taken for the step after it is part of this one."""
        # Of a step that trains, what looked like evaluation was a part.
        self.for_evaluation = self.for_evaluation and (later.for_evaluation or not later.drew)
        self.drew = self.drew or later.drew
        self.stepped = self.stepped or later.stepped
        self.evaluated = later.evaluated and self.for_evaluation
        self.forward = self.forward or later.forward
        self.zeroed = later.zeroed
        self.batches += later.batches
        self.backwards += later.backwards
        self.micro_batches += later.micro_batches
        self.optimizer_steps += later.optimizer_steps
        self.repeats += later.repeats
        self.last_optimizer = later.last_optimizer or self.last_optimizer
        self.optimizers |= later.optimizers

    def count_steps(self, *, ends_with_repeat: bool = False) -> int:
        """Return how many training steps it is: several where an optimizer stepped again on its batch.

        Args:
            ends_with_repeat: The optimizer that stepped last steps again: none of them waits for another.
        """
        if self.repeats and (ends_with_repeat or len(self.optimizers) == 1):
            return self.repeats + len(self.optimizers)
        return 1

    def count_micro_batches(self) -> int:
        """Return how many batches went backward in a training step, at least one.

        Two loaders draw twice per backward, two losses go backward twice per draw: either is one batch.
        Where nothing was drawn, each optimizer has its backward.
        """
        if self.micro_batches or self.drew:
            return max(1, self.micro_batches)
        return max(1, self.backwards // max(1, self.optimizer_steps))


_ALL_BUT_OPTIMIZERS: Final[Callable[[StepState], tuple[object, ...]]] = attrgetter(
    *(each.name for each in fields(StepState) if each.name != "optimizers")
)


# What is held: the step before the open one, of which it is not known yet whether it ended there. Nothing; a
# step that ended unless another optimizer steps; one that ended unless its batch goes on after a forward
# without gradients; a batch without an optimizer step, whose gradients may yet be used; a draw for
# evaluation, which may have been made ahead of its forward; the beginning of a step, in which the loop has
# turned to something else; or a batch for training, while another iterator is drawn from, maybe to evaluate.
NOTHING, STEPPED, EVALUATED, PENDING, UNSEEN, BEGUN, ASIDE = range(7)
HELD: Final = ("nothing", "stepped", "evaluated", "pending", "unseen", "begun", "aside")
"""Names of what can be held, by number."""

UNKNOWN: Final = 0
"""Number of an optimizer that is not known."""


class StepWatcher(Protocol):
    """Something that must act on the training thread at step edges: a capture."""

    def train_edge(self, next_index: int) -> None:
        """A training step has ended; ``next_index`` begins now."""

    def validate_edge(self) -> None:
        """A validation step has ended."""


_COUNTS: Final = (
    *("train_steps", "validate_steps", "micro_batches", "tokens", "backward_calls"),
    *("optimizer_calls", "refused", "unused"),
)


class LoopState:
    """What is known of one training loop.

    Attributes:
        micro_batches: Batches that went backward in those training steps; at least one each.
        tokens: Tokens that the script has counted.
        warmup_tokens: Those of the first training step.
        backward_calls: Backward passes, whether or not they are part of a step.
        optimizer_calls: Optimizer steps and calls of a ``GradScaler``.
        refused: Optimizer steps that a ``GradScaler`` has refused.
        unused: Batches whose gradients were zeroed before an optimizer used them.
        ready: Batches that waited in the workers' queue at the newest draw, -1 without workers.
        held: What is held, one of ``HELD`` by number.
        drawn: Which batches were drawn, and which of them used.
        first_draw: Whether the newest draw was the step's first.
        inner_samples: Samples that draws within the newest draw brought.
        uncounted: Whether the newest batch's samples are unknown.
        in_backward: An optimizer that stepped within the backward that is at work.
        draws: Whether the loop draws at all.
        draws_ahead: Whether it draws ahead of the use.
        loader_ended: Whether the iterator has ended that it drew from last.
        explicit: Whether the script ends steps itself.
        closer: The optimizer that steps last in a step.
        newest_optimizers: Those of the newest step.
        unstepped: Those that have never stepped.
        acts: Whether its model acts: it is called without gradients before it ever trained.
        model_trains: Whether a backward has followed a forward of its model.
        trains_in_eval_mode: Whether it did in evaluation mode.
        seen_evaluating: The iterator of whose batches an evaluation was seen.
        evaluates_unseen: Whether draws are all that is to be seen of an evaluation.
        loss_follows: Whether the forward that is at work computes gradients.
        evaluating: Whether a model that is trained was put into evaluation mode, and has not trained since.
        closes_alone: Whether the closer has been a step's only optimizer.
        followers: Optimizers that step between its steps: at times, and then on the same data.
        iterator: Of the event: the iterator that is asked for a batch.
        draws_for_evaluation: Of the event: whether the draw looks like one for evaluation.
        optimizer: Of the event: the optimizer that steps.
        drew_once: Of the event: whether the iterator that was left gave one batch only.
        saves: Checkpoints written between steps; those within a step are its phase ``checkpoint``.
        saving: How many saves are under way, one within the other.
    """

    def __init__(
        self, recorder: Recorder, clock: Clock, present: Callable[[], int] = time.perf_counter_ns
    ) -> None:
        self.recorder = recorder
        self.clock = clock
        self.present = present
        self.watcher: StepWatcher | None = None
        self.saves = PhaseTotals()
        self.saving = self._saving_since = 0
        self.train_steps = self.validate_steps = self.micro_batches = 0
        self.tokens = self.warmup_tokens = 0
        self.backward_calls = self.optimizer_calls = self.refused = self.unused = 0
        self.ready = -1
        self.has_stepped = False
        self.held = NOTHING
        self.held_step = StepState()
        self.step = StepState()
        self.drawn = DrawnBatches()
        self.first_draw = self.uncounted = False
        self.inner_samples = 0
        self.in_backward = UNKNOWN
        self.draws = self.draws_ahead = self.loader_ended = self.explicit = False
        self.closer = UNKNOWN
        self.newest_optimizers: frozenset[int] = frozenset()
        self.unstepped: set[int] = set()
        self.acts = self.model_trains = self.trains_in_eval_mode = False
        self.seen_evaluating = 0
        self.evaluates_unseen = self.loss_follows = False
        self.evaluating = False
        self.closes_alone = False
        self.followers: frozenset[int] = frozenset()
        self.iterator = 0
        self.draws_for_evaluation = False
        self.optimizer = UNKNOWN
        self.drew_once = False

    @property
    def skipped(self) -> int:
        """Optimizer steps that were called off: refused, or their gradients zeroed unused."""
        # Where no optimizer is ever seen, it steps inside a compiled graph.
        return self.refused + (self.unused if self.has_stepped else 0)

    def state_key(self) -> tuple[object, ...]:
        """Return all that decides what an event means; counts decide nothing, but that there are any."""
        return (
            *self.step.key(),
            *((self.held, *self.held_step.key()) if self.held else ()),
            *(self.first_draw, self.inner_samples, self.uncounted),
            *(self.draws, self.draws_ahead, self.loader_ended, self.explicit),
            *(self.closer, self.newest_optimizers, self.in_backward),
            *(frozenset(self.unstepped), self.acts, self.model_trains),
            *(self.trains_in_eval_mode, self.evaluates_unseen, self.loss_follows, self.evaluating),
            *(self.closes_alone, self.followers),
            self.seen_evaluating == self.drawn.current,
            *(self.has_stepped, self.saving, self.watcher is None, self.train_steps > 0),
            *self.drawn.state(),
        )

    def counts(self) -> dict[str, int]:
        """Return what only ever grows, by name."""
        return {name: getattr(self, name) for name in _COUNTS}

    def count_on(self, counted: dict[str, int], times: int) -> None:
        """Have each count grow so many times by so much."""
        for name, growth in counted.items():
            setattr(self, name, getattr(self, name) + times * growth)
