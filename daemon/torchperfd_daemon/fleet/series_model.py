"""What series have about runs: ranks, nodes, causes. Without numpy, which takes long to import."""

import math
from dataclasses import dataclass, field

from torchperfd_daemon.store.model import State

Source = tuple[str, ...]
"""The target that a series was scraped from."""


@dataclass(slots=True)
class RankSeries:
    """One rank; times are means per step in seconds, over the newest ten seconds before its scrape.

    Attributes:
        own_seconds: None while it makes no steps.
        wait_seconds: None where waits for other ranks are not seen.
        error_seconds: The standard error of ``own_seconds``; infinite if it is too early to compare ranks.
        phase_seconds: Rates of its phases, of which only the shares are used; empty if they were not read.
        device_seconds: The same on its device.
    """

    rank: int
    source: Source
    own_seconds: float | None = None
    wait_seconds: float | None = None
    error_seconds: float = math.inf
    state: str = State.TRAINING.value
    steps: int = 0
    last_step_unix_seconds: float = 0.0
    places: dict[str, int] = field(default_factory=dict)
    phase_seconds: dict[str, float] = field(default_factory=dict)
    device_seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CauseSeries:
    """A cause of a node's verdict, with its cost per step; the rank is None if all are alike."""

    cause: str
    rank: int | None
    phase: str
    seconds: float


@dataclass(slots=True)
class NodeSeries:
    """A node's part in a run.

    Attributes:
        ranks: How many of the run's ranks it has.
        cause: That of the verdict of its daemon; empty before there is one.
        causes: What the verdict has: its own cause and further ones.
        stalled_seconds: The time without a step in a hang; 0 without one.
        unseen: Ranks elsewhere, without which the verdict is unknown.
    """

    node: str
    ranks: int = 0
    cause: str = ""
    causes: list[CauseSeries] = field(default_factory=list)
    stalled_seconds: float = 0.0
    unseen: int = 0


@dataclass(slots=True)
class RunSeries:
    """One run on all nodes.

    Attributes:
        parts: Seconds by kind and name, of the mean account of its nodes.
        uneven_seconds: The uneven work on the node that has most of it.
        slowest: The slowest ranks and a sample of the others.
        compared: The same where they have to be compared, because one of them may be slow; else none.
    """

    run: str
    job_name: str = ""
    world_size: int = 0
    nodes: dict[Source, NodeSeries] = field(default_factory=dict)
    ranks: dict[int, RankSeries] = field(default_factory=dict)
    parts: dict[tuple[str, str], float] = field(default_factory=dict)
    uneven_seconds: float = 0.0
    slowest: list[RankSeries] = field(default_factory=list)
    compared: list[RankSeries] = field(default_factory=list)

    @property
    def missing(self) -> int:
        """The number of the run's ranks that no scraped node has."""
        return max(0, self.world_size - sum(node.ranks for node in self.nodes.values()))

    def find_slowest(self) -> None:
        """Set the ranks that are enough to find a slow one, once the work of all is there."""
        # Imports numpy, while the store answers.
        from torchperfd_daemon.diagnosis.detect.straggler import MIN_SHARE, slowest_and_peers

        training = [rank for rank in self.ranks.values() if rank.own_seconds is not None]
        training.sort(key=_slowest_first)
        self.slowest = slowest_and_peers(training)
        if len(training) > 1:
            middle = training[len(training) // 2].own_seconds or 0.0
            is_late = (training[0].own_seconds or 0.0) - middle >= MIN_SHARE * middle
            self.compared = self.slowest if is_late else []


@dataclass(slots=True)
class Series:
    """All that was read.

    Attributes:
        runs: By name.
        down: Daemons that are not scraped now.
        partial: Why the store's answer may be incomplete; empty if it is not.
    """

    runs: dict[str, RunSeries] = field(default_factory=dict)
    down: tuple[str, ...] = ()
    partial: str = ""


def _slowest_first(rank: RankSeries) -> tuple[float, int]:
    """Return by what ranks are sorted, as the judgement does: it has to have the phases of the slowest."""
    return -round(rank.own_seconds or 0.0, 9), rank.rank
