"""The held step: what the open step had so far where it may have ended, until that is known. Pure."""

from torchperfd.steps.phases import OTHER
from torchperfd.steps.step_ring import CALLS, DURATION, NS, SAMPLES, SQUARES, START, ZERO_ROW


class HeldStep:
    """A row beside the live one.

    Attributes:
        row: What the step had so far, in the columns of :mod:`torchperfd.steps.step_ring`.
        is_within: Whether the live row still contains it.
    """

    __slots__ = ("_phases", "is_within", "row")

    def __init__(self) -> None:
        self.row = list(ZERO_ROW)
        self.is_within = False
        # What was open at the edge, and its exclusive nanoseconds until then.
        self._phases: list[tuple[int, int]] = []

    def take(
        self, row: list[int], start: int, duration: int, samples: int, phases: list[tuple[int, int]]
    ) -> None:
        """Copy the live row.

        Args:
            row: The live row.
            start: When the step began, Unix nanoseconds.
            duration: How long it has taken so far, ns.
            samples: What it has trained or validated on so far.
            phases: What is open at the edge, outermost first, with its exclusive nanoseconds so far.
        """
        self.row[:] = row
        self.row[START], self.row[DURATION], self.row[SAMPLES] = start, duration, samples
        self._phases = phases
        self.is_within = True

    def add_to(self, row: list[int]) -> None:
        """Add its phases to a live row that does not contain it."""
        for column in range(NS, len(row)):
            row[column] += self.row[column]

    def take_out(self, row: list[int], exclusive: list[int], open_depth: int) -> None:
        """Take its phases out of the live row that contains it.

        A phase of the script's own around the edge is one call on either side.

        Args:
            row: The live row.
            exclusive: Exclusive nanoseconds of the open phases, by depth.
            open_depth: Down to which depth the phases that were open at the edge still are.
        """
        self.is_within = False
        held = self.row
        for column in range(NS, len(row)):
            row[column] -= held[column]
        phases = [OTHER, *(phase for phase, _ in self._phases)]
        within = ended = 0
        for depth, (phase, spent) in reversed([*enumerate(self._phases, start=1)]):
            within += spent
            ended += spent
            if depth <= open_depth:
                exclusive[depth] -= ended
                ended = 0
            if phases[depth - 1] == phase:
                continue
            row[NS + phase] -= ended
            held[NS + phase] += within
            held[CALLS + phase] += 1
            held[SQUARES + phase] += within * within
            within = ended = 0
        # A phase of the gap's own name, outermost, is part of the gap.
        row[NS + OTHER] -= ended
        held[NS + OTHER] += within
