"""The time of a rank's step that no cause has claimed yet. Pure."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from torchperfd_daemon.diagnosis.detect.straggler import WAITING
from torchperfd_daemon.diagnosis.evidence import RankEvidence

# Of a rank's own work, at least this part is no wait.
_LEAST_WORK: Final = 0.05


@dataclass(slots=True)
class Unclaimed:
    """The seconds of one rank's step that no cause has claimed yet.

    Attributes:
        late: What is left of the rank's lateness.
        computed: What causes have claimed that contain their part of the wait for a processor.
        queued: The wait for a processor that a lack of these on all ranks has claimed.
    """

    phases: dict[str, float]
    late: float
    computed: float = 0.0
    queued: float = 0.0

    @property
    def own(self) -> float:
        """What is left of the rank's own work."""
        return sum(seconds for name, seconds in self.phases.items() if name not in WAITING)

    @property
    def queued_share(self) -> float:
        """The part of a wait for processors outside the claimed time; it falls on all own work alike."""
        runnable = self.own + self.computed
        return self.own / runnable if self.computed and runnable > 0 else 1.0

    def take_queue(self, beyond_peers: float, queued: float) -> None:
        """Subtract the wait that the rank has beyond its peers' from its lateness; keep all its wait."""
        self.late -= min(self.late, max(0.0, beyond_peers))
        self.queued = queued

    def without_queue(self, rank: RankEvidence) -> RankEvidence:
        """Return the rank's evidence without its claimed wait for a processor.

        That wait falls on all own work alike, so that times which contain a part of it shrink.
        """
        own = sum(seconds for name, seconds in rank.phase_seconds.items() if name not in WAITING)
        if not self.queued or own <= 0:
            return rank
        share = max(0.0, 1 - self.queued / own)
        return replace(
            rank,
            phase_seconds=self.phases,
            collected_seconds=share * rank.collected_seconds,
            compiled_seconds=share * rank.compiled_seconds,
            checkpoint_seconds=share * rank.checkpoint_seconds,
        )

    def take(self, phase: str, seconds: float) -> None:
        """Subtract time from a phase, or from all own work in proportion if the phase is unknown."""
        names = [phase] if phase in self.phases else [name for name in self.phases if name not in WAITING]
        total = sum(self.phases[name] for name in names)
        for name in names:
            self.phases[name] *= max(0.0, 1 - seconds / total) if total > 0 else 1.0


def equal_work_waits(seen: Sequence[RankEvidence], waits: Sequence[float]) -> list[float]:
    """Return how long each rank would wait for a processor if it had no more work than its peers.

    A rank with more work waits longer in proportion. That part of its wait belongs to the work: without it,
    the rank would not be late. It is at most the lateness. A past shows best how the work differs, since less
    of it is a wait then.

    Args:
        waits: Of each rank, in seconds per step.
    """
    works = [_work_seconds(rank.before or rank) for rank in seen]
    found = []
    for number, (rank, wait) in enumerate(zip(seen, waits, strict=True)):
        peers = statistics.median(works[:number] + works[number + 1 :]) if len(works) > 1 else 0.0
        more = works[number] / peers if peers > 0 else 1.0
        found.append(max(0.0, wait - rank.late_seconds, wait / max(1.0, more)))
    return found


def _work_seconds(rank: RankEvidence) -> float:
    """Return a rank's own work without its wait for a processor, some of which is in its wait for others."""
    return max(rank.own_seconds - rank.queued_seconds, _LEAST_WORK * rank.own_seconds)


def exchange_growth(seen: Sequence[RankEvidence]) -> float:
    """Return the growth of the time that even the last rank to arrive spends in collectives.

    If own work has grown on all ranks, the exchange may grow in proportion, since it needs processors too.
    0 without a past.
    """
    pasts = [rank.before for rank in seen if rank.before]
    if len(seen) < 2 or len(pasts) < len(seen):
        return 0.0
    slower = [
        rank.own_seconds / past.own_seconds
        for rank, past in zip(seen, pasts, strict=True)
        if past.own_seconds > 0
    ]
    now = min(rank.wait_seconds for rank in seen)
    before = min(past.wait_seconds for past in pasts)
    return max(0.0, now - before * max(1.0, statistics.median(slower or [1.0])))
