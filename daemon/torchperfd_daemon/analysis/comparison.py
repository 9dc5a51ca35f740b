"""A comparison of two captures, or of two ranks: what is new, gone, or changed beyond noise."""

from dataclasses import dataclass
from typing import Final, Literal

Status = Literal["new", "gone", "changed", "same"]
ComparedTable = Literal["phases", "device", "operators", "launched", "kernels", "memory"]
# The share of tables without a real difference in which one may be reported.
LEVEL: Final = 0.05
# A difference below this part of the step is not reported, however certain it is.
NEGLIGIBLE_OF_STEP: Final = 0.001
# Where noise is unknown, a difference counts from this part of the row and of the step on.
UNKNOWN_NOISE_OF_ROW: Final = 0.10
UNKNOWN_NOISE_OF_STEP: Final = 0.01
# A device that is busy for this part of the steps determines their length.
_BUSY: Final = 0.5
# The headline names at most so many rows, each with this part of the difference or more.
_CAUSES: Final = 3
_WORTH_NAMING: Final = 0.10


@dataclass(frozen=True, slots=True)
class Change:
    """One row, before and after: means per step, times in ns, memory in bytes.

    Attributes:
        name: The operator or kernel, the part of a `Breakdown`, the kind of `MemorySteps`.
        calls_before: Its calls per step of the first side; None for a row without calls.
        calls_after: The same of the second side.
        p_value: The chance that noise alone makes such a difference, for this row alone; None where noise
            is unknown or the row is on one side only.
        status: ``new`` and ``gone`` are on one side only; ``changed`` is beyond noise, and more than a
            thousandth of the step.
    """

    name: str
    before: float
    after: float
    calls_before: float | None
    calls_after: float | None
    p_value: float | None
    status: Status

    @property
    def difference(self) -> float:
        """The increase; negative for a saving."""
        return self.after - self.before

    @property
    def percent(self) -> float | None:
        """The difference in percent of the first side; None if that is 0."""
        return 100 * self.difference / abs(self.before) if self.before else None


@dataclass(frozen=True, slots=True)
class Side:
    """The traces and steps of one side of a comparison.

    Attributes:
        steps: The steps that count: those of all its ranks. 0 where the whole recording counts.
        device_names: The models of its accelerators, each once.
    """

    paths: tuple[str, ...]
    steps: int
    device_names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Comparison:
    """Every row of two sides. Tables are ordered by absolute difference, the largest first.

    Attributes:
        per_step: Values are per step. Otherwise they are of whole recordings, since one has no steps.
        noise_known: Both have several steps, so that ``changed`` means beyond noise.
        step: Time of a step, on the device where the host runs ahead of it; or of the recording.
        phases: Host time of a step by phase; empty without steps.
        device: The device's time in a step, by the parts of `Breakdown`; empty without a device.
        operators: Self CPU time by name; over the rows of one thread it adds up to the step.
        launched: Device time by the name of the operator that launched it.
        kernels: Time of kernels, copies and fills by name.
        memory: The kinds of `MemorySteps`; empty unless both recordings have memory.
        ranks: The step of each rank, where several are compared. The tables are then of their mean.
    """

    before: Side
    after: Side
    per_step: bool
    noise_known: bool
    step: Change
    phases: tuple[Change, ...]
    device: tuple[Change, ...]
    operators: tuple[Change, ...]
    launched: tuple[Change, ...]
    kernels: tuple[Change, ...]
    memory: tuple[Change, ...]
    ranks: tuple[tuple[int | None, Change], ...]

    def table(self, name: ComparedTable) -> tuple[Change, ...]:
        """Return the rows of one table."""
        rows: tuple[Change, ...] = getattr(self, name)
        return rows

    def causes(self) -> tuple[Change, ...]:
        """Return the rows that explain most of the step's difference, at most three, largest first.

        They are kernels where the device is busy for half of both steps, and operators otherwise.
        """
        busy = next((row for row in self.device if row.name == "busy"), None)
        waits_for_device = busy is not None and (
            busy.before >= _BUSY * self.step.before and busy.after >= _BUSY * self.step.after
        )
        whole = self.step.difference
        found = [
            row
            for row in (self.kernels if waits_for_device else self.operators)
            if row.status != "same" and row.difference * whole > 0
        ]
        return tuple(row for row in found[:_CAUSES] if abs(row.difference) >= _WORTH_NAMING * abs(whole))

    def kernels_beside(self) -> tuple[Change, ...]:
        """Return the kernels that changed though the step did not, at most three, largest first."""
        if self.step.status != "same":
            return ()
        least = NEGLIGIBLE_OF_STEP * max(self.step.before, self.step.after)
        changed = (row for row in self.kernels if row.status != "same" and abs(row.difference) >= least)
        return tuple(changed)[:_CAUSES]
