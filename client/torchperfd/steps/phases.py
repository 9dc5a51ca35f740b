"""Phases and step batches: the slots of phases, and consecutive steps of one kind in columns. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from torchperfd.v1.contract import MAX_USER_PHASES, PHASES

PHASE_SLOTS: Final = len(PHASES) + MAX_USER_PHASES
DATA: Final = PHASES.index("data")
FORWARD: Final = PHASES.index("forward")
LOSS: Final = PHASES.index("loss")
BACKWARD: Final = PHASES.index("backward")
OPTIMIZER: Final = PHASES.index("optimizer")
ZERO_GRAD: Final = PHASES.index("zero_grad")
COLLECTIVE_WAIT: Final = PHASES.index("collective_wait")
CHECKPOINT: Final = PHASES.index("checkpoint")
OTHER: Final = PHASES.index("other")
AFTER_EVALUATION: Final = PHASE_SLOTS
"""Between two slots: what follows a forward without gradients. Of a training step it is ``other``, of a
validation step ``loss``; a slot of its own until the step ends, and none of the slots of a finished step."""


class PhaseNames:
    """Hands out slots to user phases; past the limit they share ``other``'s."""

    def __init__(self) -> None:
        self._names: list[str] = list(PHASES)
        self._slots: dict[str, int] = {name: slot for slot, name in enumerate(PHASES)}
        self.overflowed: set[str] = set()

    def slot(self, name: str) -> int:
        """Return the slot of ``name``, taking a new one when there is room.

        Raises:
            ValueError: ``name`` is empty, longer than 64 characters, or has control characters.
        """
        slot = self._slots.get(name)
        if slot is not None:
            return slot
        if not name or len(name) > 64 or not name.isprintable():
            raise ValueError(f"a phase name is 1 to 64 printable characters, not {name!r}")
        if len(self._names) >= PHASE_SLOTS:
            if len(self.overflowed) < MAX_USER_PHASES:
                self.overflowed.add(name)
            return self._slots["other"]
        self._names.append(name)
        self._slots[name] = len(self._names) - 1
        return self._slots[name]

    def name(self, slot: int) -> str:
        """Return the name of a slot that was handed out."""
        return self._names[slot]

    def __len__(self) -> int:
        return len(self._names)


TRAIN: Final = 1
VALIDATE: Final = 2


@dataclass(frozen=True, slots=True)
class PhaseColumns:
    """What one phase took in the steps of a batch.

    Attributes:
        ns: Exclusive nanoseconds, by step.
        calls: Calls, by step.
        total_ns: Sum of ``ns``.
        total_calls: Sum of ``calls``.
        squares: Sum over all calls of squared nanoseconds.
    """

    ns: "memoryview[int]"
    calls: "memoryview[int]"
    total_ns: int
    total_calls: int
    squares: float


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Finished steps, at least one. Columns are of int64. The first training step of all is one of its own.

    Attributes:
        index: Each one's number within its kind, one after the other.
        kind: ``TRAIN`` or ``VALIDATE``, the same for all.
        start: When each began, Unix nanoseconds.
        duration: How long each took, nanoseconds.
        samples: What each trained or validated on.
        phases: By slot, those that occurred.
        total_ns: Sum of ``duration``.
        squares: Sum of squared ``duration``.
        total_samples: Sum of ``samples``.
    """

    index: "memoryview[int]"
    kind: "memoryview[int]"
    start: "memoryview[int]"
    duration: "memoryview[int]"
    samples: "memoryview[int]"
    phases: Mapping[int, PhaseColumns]
    total_ns: int
    squares: float
    total_samples: int

    @property
    def count(self) -> int:
        """How many steps."""
        return len(self.duration)
