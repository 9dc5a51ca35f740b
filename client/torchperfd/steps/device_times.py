"""What steps have taken on the device, and for how many others each of them stands. Pure."""

from collections import Counter
from dataclasses import dataclass
from typing import Final

from torchperfd.steps.phases import AFTER_EVALUATION, COLLECTIVE_WAIT, OTHER, TRAIN, slot_after_evaluation

NO_KIND: Final = 0
"""Of a step that is to be forgotten."""


@dataclass(frozen=True, slots=True)
class DeviceTime:
    """What one phase has taken on the device, in steps of one kind.

    Where not every step was timed, these are the timed ones' times multiplied by the number of steps that
    each of them stands for.

    Attributes:
        kind: Kind of the steps, as passed to :meth:`EndedSteps.add`.
        phase: Slot of the phase.
        ns: Exclusive nanoseconds on the device.
        calls: Calls of the phase that had time there.
    """

    kind: int
    phase: int
    ns: int
    calls: int


class StepTimes:
    """The times of a step, or of what was set aside of one.

    Attributes:
        kind: Kind of the step; -1 while it is not known.
        is_whole: Whether no interval is missing.
        weight: How many steps it stands for.
        ns: Nanoseconds by phase, of the intervals that were read.
        calls: Calls by phase.
        running: Phases that had an interval in a call which has not ended.
        pending: Intervals that are yet to be read.
        own_ns: Nanoseconds of those that were given out, without waits for other ranks.
        into: The times that these were added to, if they were.
    """

    __slots__ = ("calls", "into", "is_whole", "kind", "ns", "own_ns", "pending", "running", "weight")

    def __init__(self) -> None:
        self.kind = -1
        self.is_whole = True
        self.weight = 1.0
        self.ns: dict[int, int] = {}
        self.calls: dict[int, int] = {}
        self.running: set[int] = set()
        self.pending = 0
        self.own_ns = 0
        self.into: StepTimes | None = None

    def count(self, phase: int) -> None:
        self.calls[phase] = self.calls.get(phase, 0) + 1

    def absorb(self, later: "StepTimes") -> None:
        """Add what came later; it belongs to the same step."""
        for phase, ns in later.ns.items():
            self.ns[phase] = self.ns.get(phase, 0) + ns
        for phase, calls in later.calls.items():
            self.calls[phase] = self.calls.get(phase, 0) + calls
        self.running |= later.running
        self.is_whole &= later.is_whole
        self.pending += later.pending
        later.into = self


class EndedSteps:
    """Steps that have ended: those that are whole stand for all of their kind since the ones before.

    Attributes:
        had_whole: Whether a whole step has ended since this was set to False.
        work_steps: Whole training steps that were read.
        work_ns: What they took without waits for other ranks.
        work_squares: The sum of the squares of that.
    """

    def __init__(self) -> None:
        self.had_whole = False
        self.work_steps = self.work_ns = 0
        self.work_squares = 0.0
        # By kind: the steps since the newest that have a weight, and those of them that are whole.
        self._steps: Counter[int] = Counter()
        self._unweighted: list[StepTimes] = []
        # Those with a weight of which times were not given out, or are yet to be read.
        self._changed: list[StepTimes] = []
        # By kind and phase: nanoseconds and calls less than one.
        self._remainders: dict[tuple[int, int], tuple[float, float]] = {}

    def add(self, step: StepTimes, kind: int) -> None:
        """A step has ended; ``NO_KIND`` when it is to be forgotten."""
        step.kind = kind
        for phase in step.running:
            step.count(phase)
        if kind == NO_KIND:
            return
        self._steps[kind] += 1
        if step.is_whole:
            self.had_whole = True
            self._unweighted.append(step)

    def pass_over(self, kind: int, count: int) -> None:
        self._steps[kind] += count

    def weigh(self) -> None:
        """Have the whole steps since the last time stand for all steps since those before them."""
        whole = Counter(step.kind for step in self._unweighted)
        for step in self._unweighted:
            step.weight = self._steps[step.kind] / whole[step.kind]
        for kind in whole:
            del self._steps[kind]
        self._changed += self._unweighted
        self._unweighted = []

    def give_out(self) -> list[DeviceTime]:
        """Return what has been read since the last time of steps with a weight."""
        due = self._remainders
        for step in self._changed:
            for phase in step.ns.keys() | step.calls.keys():
                slot = phase if phase != AFTER_EVALUATION else slot_after_evaluation(step.kind)
                ns, calls = due.get((step.kind, slot), (0.0, 0.0))
                ns += step.ns.get(phase, 0) * step.weight
                if slot == phase or slot != OTHER:  # what is no phase of its own has one call a step
                    calls += step.calls.get(phase, 0) * step.weight
                due[step.kind, slot] = ns, calls
            step.own_ns += sum(step.ns.values()) - step.ns.get(COLLECTIVE_WAIT, 0)
            if not step.pending and step.is_whole and step.kind == TRAIN:
                self.work_steps += 1
                self.work_ns += step.own_ns
                self.work_squares += float(step.own_ns) ** 2
            step.ns.clear()
            step.calls.clear()
        self._changed = [step for step in self._changed if step.pending]
        given = []
        for key in sorted(due):
            ns, calls = due[key]
            time = DeviceTime(*key, _units(ns), _units(calls))
            due[key] = ns - time.ns, calls - time.calls
            if time.ns or time.calls:
                given.append(time)
        return given


def _units(value: float) -> int:
    """Return the whole units of a sum of fractions, which rounding may have left just below one."""
    return int(value + 1e-3)
