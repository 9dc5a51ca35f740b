"""The data of one moment in ``top``."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torchperfd.v1 import control_pb2
from torchperfd_daemon.views.live import RunView
from torchperfd_daemon.views.node_view import NodeView


@dataclass(frozen=True, slots=True)
class Frame:
    """The data of one moment.

    Attributes:
        clock: The time of day, for people.
        problem: Why the data is stale, or which daemons do not answer; empty without a problem.
        nodes: How many have answered for the fleet; 0 where only this one was asked.
        step_seconds: The newest step times of each run, oldest first.
        samples_per_second: The newest throughput of each run, oldest first; without runs where it is unknown.
        ages: Seconds since the last step of each run ended; without runs that have made none.
        steps: The newest steps of each rank.
    """

    node: str
    clock: str
    view: NodeView
    runs: Sequence[RunView]
    verdicts: Mapping[str, control_pb2.Verdict] = field(default_factory=dict)
    problem: str = ""
    nodes: int = 0
    step_seconds: Mapping[str, Sequence[float]] = field(default_factory=dict)
    samples_per_second: Mapping[str, Sequence[float]] = field(default_factory=dict)
    ages: Mapping[str, float] = field(default_factory=dict)
    steps: Sequence[control_pb2.RankSteps] = ()
