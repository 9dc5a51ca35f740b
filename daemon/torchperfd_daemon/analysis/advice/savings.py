"""What an edit of the recorded steps saves: the replayed step less the replayed step with the edit.

The steps are replayed as they are when nothing is recorded. The cost of each recorded event is taken off the
host's time. If the length of unrecorded steps is known, all of the host's work is then scaled until the
replayed steps have that length: recording makes a host that launches slower than its events explain.
"""

from functools import cached_property
from typing import Final

from torchperfd_daemon.analysis.replay import NOTHING, Edit, HostCost, Timeline

# A larger error of the replay makes each saving a range.
_CERTAIN: Final = 0.05
# Replayed steps are scaled to the unrecorded length this closely, in at most so many replays.
_CLOSE: Final = 0.003
_MAX_TRIES: Final = 12


class Savings:
    """The savings of edits in the steps of one trace.

    Args:
        timeline: The graph of the steps.
        cost: What recording cost their host.
        recorded_ns: The mean recorded step.
        step_ns: The mean step when nothing is recorded.
        is_known: That is a measured length, and not an estimate from the recording.

    """

    def __init__(
        self, timeline: Timeline, cost: HostCost, recorded_ns: float, step_ns: float, *, is_known: bool
    ) -> None:
        self._timeline = timeline
        self._cost = cost
        self._recorded_ns = recorded_ns
        self._step_ns = step_ns
        self._is_known = is_known

    @cached_property
    def step_ns(self) -> float:
        """The mean step when nothing is recorded, of which the savings are parts.

        Recording does not lengthen a step whose host waits for the device anyway.
        """
        return (
            max(self._step_ns, min(self._unedited_ns, self._recorded_ns))
            if self._timeline.busy
            else self._step_ns
        )

    def of(self, edit: Edit) -> float:
        """Return what an edit saves of a step, in ns; never more than the step."""
        left = self._timeline.replay(edit, self._base).step_ns
        saved = min(max(self._unedited_ns - left, 0.0), self._unedited_ns)
        if self._timeline.busy or not self._unedited_ns:
            return min(saved, self.step_ns)
        # Recorded operators of a host alone take longer by one factor.
        return self.step_ns * saved / self._unedited_ns

    @cached_property
    def margin_ns(self) -> float:
        """How far a saving may be off either way, in ns a step; 0 if the replay explains the recording."""
        return self.step_ns * self.error if self.error > _CERTAIN else 0.0

    @cached_property
    def error(self) -> float:
        """The part of the recorded step that the replayed graph does not explain, 0 to 1."""
        if not self._timeline.busy or not self._recorded_ns:
            return 0.0
        replayed, explained = (
            self._timeline.replay(NOTHING, explained=only).step_ns for only in (False, True)
        )
        apart = max(abs(replayed - self._recorded_ns), replayed - explained)
        return min(apart / self._recorded_ns, 1.0)

    @cached_property
    def _unedited_ns(self) -> float:
        return self._timeline.replay(NOTHING, self._base).step_ns

    @cached_property
    def _base(self) -> HostCost:
        """What is taken off the host's time, so that the replayed steps are those that are not recorded."""
        whole, cost = self._timeline.replay(NOTHING, self._cost).step_ns, self._cost
        if not self._is_known or whole <= (1 + _CLOSE) * self._step_ns:
            return cost
        if self._timeline.replay(NOTHING, HostCost(cost.up_to, cost.scaled, 0.0)).step_ns > self._step_ns:
            return cost  # The device alone takes longer than that.
        low, high = 0.0, 1.0
        for _ in range(_MAX_TRIES):
            middle = (low + high) / 2
            scaled = HostCost(cost.up_to, cost.scaled, middle)
            if self._timeline.replay(NOTHING, scaled).step_ns > (1 + _CLOSE) * self._step_ns:
                high = middle
            else:
                low = middle
        return HostCost(cost.up_to, cost.scaled, low)
