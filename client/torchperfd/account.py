"""The account: what drained steps add up to, per kind of step and phase. Pure."""

import math
from dataclasses import dataclass, field

from torchperfd.recorder import (
    CALLS,
    DURATION,
    KIND,
    NS,
    PHASE_SLOTS,
    SAMPLES,
    TRAIN,
    VALIDATE,
    Rows,
)


@dataclass(slots=True)
class PhaseAccount:
    """Totals of one phase.

    Attributes:
        calls: How often the phase was entered.
        ns: Exclusive host time.
        squares: Sum over calls of squared nanoseconds.
    """

    calls: int = 0
    ns: int = 0
    squares: float = 0.0

    @property
    def seconds(self) -> float:
        """Exclusive host time in seconds."""
        return self.ns / 1e9

    @property
    def mean_seconds(self) -> float:
        """Mean exclusive time of a call."""
        return self.ns / self.calls / 1e9 if self.calls else 0.0

    @property
    def std_seconds(self) -> float:
        """Population standard deviation of a call's exclusive time."""
        if not self.calls:
            return 0.0
        mean = self.ns / self.calls
        return math.sqrt(max(0.0, self.squares / self.calls - mean * mean)) / 1e9


@dataclass(slots=True)
class KindAccount:
    """Totals of all steps of one kind; ``phases`` is indexed by phase slot."""

    steps: int = 0
    ns: int = 0
    samples: int = 0
    phases: list[PhaseAccount] = field(default_factory=lambda: [PhaseAccount() for _ in range(PHASE_SLOTS)])

    def fold(self, rows: Rows) -> None:
        """Add steps of this kind. A few C-level sums per phase, however many the steps."""
        self.steps += rows.count
        self.ns += sum(rows.column(DURATION))
        self.samples += sum(rows.column(SAMPLES))
        for slot, phase in enumerate(self.phases):
            calls = sum(rows.column(CALLS + slot))
            if calls:
                phase.calls += calls
                phase.ns += sum(rows.column(NS + slot))
                phase.squares += sum(rows.squares[slot::PHASE_SLOTS])


@dataclass(slots=True)
class Account:
    """Everything since attach."""

    train: KindAccount = field(default_factory=KindAccount)
    validate: KindAccount = field(default_factory=KindAccount)

    def fold(self, rows: Rows) -> None:
        """Add drained steps, whatever their kinds."""
        kinds = rows.column(KIND)
        start = 0
        while start < rows.count:
            kind = kinds[start]
            stop = start + 1
            while stop < rows.count and kinds[stop] == kind:
                stop += 1
            self.of(kind).fold(rows.part(start, stop))
            start = stop

    def of(self, kind: int) -> KindAccount:
        """Return the totals of ``TRAIN`` or ``VALIDATE`` steps."""
        if kind == TRAIN:
            return self.train
        if kind == VALIDATE:
            return self.validate
        raise ValueError(f"no such kind of step: {kind}")
