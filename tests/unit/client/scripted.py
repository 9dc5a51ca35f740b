"""A clock that moves only by command, and a loop that is played by hand against it."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from torchperfd.steps.loop import Loop
from torchperfd.steps.phases import TRAIN, VALIDATE, PhaseNames, StepBatch
from torchperfd.steps.recorder import Recorder
from torchperfd.v1.contract import MAX_USER_PHASES

WALL_AHEAD = 1_700_000_000_000_000_000
"""How far the scripted wall clock is ahead of the monotonic one."""

NAMES = PhaseNames()


def all_names() -> PhaseNames:
    """Return names of which every slot is taken."""
    names = PhaseNames()
    for number in range(MAX_USER_PHASES):
        names.slot(f"mine {number} ✓")
    return names


class Clock:
    """Nanoseconds; the recorder's and the loop's clock."""

    def __init__(self, now: int = 1000) -> None:
        self.now = now

    def __call__(self) -> int:
        return self.now

    def advance(self, ns: int) -> None:
        """Let time pass."""
        self.now += ns


@dataclass(frozen=True)
class Step:
    """A drained step, readable; ``phases`` maps a name to (calls, exclusive nanoseconds)."""

    kind: str
    index: int
    duration: int
    phases: dict[str, tuple[int, int]]
    samples: int = 0
    start: int = field(default=0, compare=False)


def unpack(drained: Iterable[StepBatch], names: PhaseNames = NAMES) -> list[Step]:
    """Return drained steps one by one, without the phases that did not occur."""
    return [
        Step(
            kind={TRAIN: "train", VALIDATE: "validate"}[batch.kind[number]],
            index=batch.index[number],
            duration=batch.duration[number],
            phases={
                names.name(slot): (columns.calls[number], columns.ns[number])
                for slot, columns in batch.phases.items()
                if columns.calls[number] or columns.ns[number]
            },
            samples=batch.samples[number],
            start=batch.start[number] - WALL_AHEAD,
        )
        for batch in drained
        for number in range(batch.count)
    ]


class ScriptedLoop:
    """Makes the hook calls that a training script causes, each of which takes a given time."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.recorder = Recorder(self.clock, capacity=64)
        self.recorder.wall_offset = WALL_AHEAD
        self.loop = Loop(self.recorder, self.clock, self.clock)

    def draw(self, ns: int = 1, samples: int = 0, iterator: int = 8, **how: bool) -> None:
        self.loop.draw_begin(iterator, **how)
        self.clock.advance(ns)
        self.loop.draw_end(samples)

    def exhausted(self, ns: int = 1, iterator: int = 8, **how: bool) -> None:
        """A draw that finds its loader at the end."""
        self.loop.draw_begin(iterator, **how)
        self.clock.advance(ns)
        self.loop.draw_stop(iterator)

    def forward(self, ns: int = 1) -> None:
        self.loop.forward_begin(gradients=True)
        self.clock.advance(ns)
        self.loop.forward_end()

    def evaluate(self, ns: int = 1) -> None:
        """A forward without gradients."""
        self.loop.forward_begin(gradients=False)
        self.clock.advance(ns)
        self.loop.forward_end()

    def backward(self, ns: int = 1) -> None:
        depth = self.recorder.depth
        self.loop.backward_begin()
        self.clock.advance(ns)
        self.loop.backward_end(depth)

    def optimizer_step(self, ns: int = 1) -> None:
        self.loop.optimizer_begin()
        self.clock.advance(ns)
        self.loop.optimizer_end()

    def zero_grad(self, ns: int = 1) -> None:
        self.loop.zero_begin()
        self.clock.advance(ns)
        self.loop.exit()

    def other(self, ns: int) -> None:
        """The script does something that no hook sees."""
        self.clock.advance(ns)

    def train_on_batch(self) -> None:
        """What a plain script does with a batch: 100 ns of it forward, 200 backward, and so on."""
        self.forward(100)
        self.other(20)  # the loss
        self.backward(200)
        self.optimizer_step(50)
        self.zero_grad(5)
        self.other(7)

    def steps(self) -> list[Step]:
        """Take what was recorded since the last look."""
        return unpack(self.recorder.drain())
