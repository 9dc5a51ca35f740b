"""Step batches: consecutive steps of one kind, in columns and added up. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

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
