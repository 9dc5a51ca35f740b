"""The other nodes' daemons, as the commands of this one use them."""

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from torchperfd.v1 import control_pb2, fleet_pb2
from torchperfd_daemon.captures import Participant


@dataclass(frozen=True, slots=True)
class RankSelection:
    """Ranks of one run, wherever they are.

    Attributes:
        participants: The requested ranks; for each that was not found, one that fails with the reason.
        elsewhere: Rank to node, of those on other nodes.
        unreachable: The peers that have not answered.
    """

    run: str
    participants: list[Participant]
    elsewhere: dict[int, str]
    unreachable: list[control_pb2.UnreachablePeer]


MayCommand = Callable[[int | None], bool]
"""Returns whether the caller may command the processes of a user; None is an unknown user."""

Redact = Callable[[control_pb2.Verdict, Iterable[int | None]], None]
"""Removes from the verdict on a run of users what the caller may not see."""


class PeerDirectory(Protocol):
    """Queries the other nodes, as ``fleet.FleetView`` does; raises TorchperfdError when it knows of none.

    ``may`` is the caller's right: nodes that only ranks of other users name are not asked.
    """

    @property
    def known(self) -> bool:
        """Whether it is known which there are; a job is then looked for on all of them."""

    async def runs(
        self, own: Sequence[control_pb2.Run], may: MayCommand, job: str = ""
    ) -> control_pb2.ListRunsResponse:
        """Return the runs of all nodes, of all jobs or of one; those of this one are given."""

    async def steps(
        self, asked: fleet_pb2.NodeSurveyRequest, own: fleet_pb2.NodeSurvey, may: MayCommand
    ) -> control_pb2.GetStepsResponse:
        """Return the newest steps of ranks of all nodes, what this one answers given."""

    async def diagnose(
        self,
        asked: fleet_pb2.NodeSurveyRequest,
        own: fleet_pb2.NodeSurvey,
        redact: Redact,
        may: MayCommand,
        seconds: float | None = None,
    ) -> control_pb2.DiagnoseResponse:
        """Return one verdict on each run of all nodes, what this one answers given.

        Args:
            seconds: How long each peer may take; by default as long as for any survey.
        """

    async def choose(self, run: str, own: Sequence[str], may: MayCommand) -> str:
        """Return a run's name; when it is empty, that of the only run of the caller's on any node."""

    def stacks(
        self, request: control_pb2.StacksRequest, may: MayCommand
    ) -> AsyncIterator[control_pb2.RankStacks]:
        """Yield the stacks of the caller's ranks of a run on other nodes, and the peers that are silent."""

    def gather(
        self,
        run: str,
        ranks: Sequence[int],
        own: Callable[[], dict[str, list[Participant]]],
        may: MayCommand,
        job: str = "",
    ) -> AbstractAsyncContextManager[RankSelection]:
        """Connect to ranks of a run on all nodes, for one capture."""
