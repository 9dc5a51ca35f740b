"""Step state: what a loop knows of one step, the open one or the one that is set aside. Pure."""


class StepState:
    """What has happened in a step so far.

    Attributes:
        closure_used: Whether the closure of the optimizer that steps, or stepped last, has gone backward.
        drew: Whether it asked a loader for a batch.
        for_evaluation: Whether every one of its draws looked like evaluation.
        stepped: Whether an optimizer stepped, or was to.
        evaluated: Whether it looks like a validation step.
        forward: Whether a forward with gradients was seen.
        zeroed: Whether gradients were zeroed after the newest backward.
        batches: Batches that it drew.
        backwards: Backward passes.
        micro_batches: Backward passes that used a new batch.
        optimizer_steps: Optimizer steps.
        repeats: Those of them that are steps of their own, unless one that never stepped takes part.
        optimizers: Which optimizers stepped.
        resumed: Whether it began before the validation that ended last.
        last_optimizer: The one that stepped last, 0 for none.
    """

    __slots__ = (
        "backwards",
        "batches",
        "closure_used",
        "drew",
        "evaluated",
        "for_evaluation",
        "forward",
        "last_optimizer",
        "micro_batches",
        "optimizer_steps",
        "optimizers",
        "repeats",
        "resumed",
        "stepped",
        "zeroed",
    )

    def __init__(self) -> None:
        self.drew = self.for_evaluation = self.stepped = self.evaluated = False
        self.forward = self.zeroed = self.resumed = self.closure_used = False
        self.batches = self.backwards = self.micro_batches = self.optimizer_steps = self.repeats = 0
        self.last_optimizer = 0
        self.optimizers: set[int] = set()

    def key(self) -> tuple[object, ...]:
        """Return all of it, comparable."""
        return (
            *(self.drew, self.for_evaluation, self.stepped, self.evaluated, self.forward, self.zeroed),
            *(self.batches, self.backwards, self.micro_batches, self.optimizer_steps),
            *(self.last_optimizer, frozenset(self.optimizers), self.resumed, self.closure_used, self.repeats),
        )

    def begin_draw(self, for_evaluation: bool) -> None:
        """A loader is asked for a batch."""
        self.for_evaluation = for_evaluation and (self.for_evaluation or not self.drew)
        self.drew = True

    def step(self, optimizer: int) -> None:
        """An optimizer has stepped."""
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
