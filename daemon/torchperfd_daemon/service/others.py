"""The other nodes' daemons, as far as commands asked of this one are concerned."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from torchperfd.v1 import control_pb2
from torchperfd_daemon.captures import Participant


@dataclass(frozen=True, slots=True)
class Gathered:
    """Ranks of one run, wherever they are.

    Attributes:
        run: Its name.
        participants: The ranks asked for; of those that could not be found, one that says why.
        elsewhere: Rank to node, of those on other nodes.
        unreachable: The peers that have not answered.
    """

    run: str
    participants: list[Participant]
    elsewhere: dict[int, str]
    unreachable: list[control_pb2.UnreachablePeer]


class Others(Protocol):
    """Asks the other nodes. Each method raises TorchperfdError when it is not known which there are."""

    async def runs(self, own: Sequence[control_pb2.Run]) -> control_pb2.ListRunsResponse:
        """Return the runs of all nodes, those of this one given."""

    async def choose(self, run: str, own: Sequence[str]) -> str:
        """Return a run's name; when it is empty, that of the only run there is on any node.

        Raises:
            NoSuchTargetError: There is no run, or more than one.
        """

    def stacks(self, request: control_pb2.StacksRequest) -> AsyncIterator[control_pb2.RankStacks]:
        """Yield the stacks of a run's ranks on other nodes, and the peers that do not answer."""

    def gather(
        self, run: str, ranks: Sequence[int], own: Callable[[], dict[str, list[Participant]]]
    ) -> AbstractAsyncContextManager[Gathered]:
        """Hold on to ranks of a run on all nodes, for one capture.

        Args:
            run: Its name; empty for the only one there is.
            ranks: Which; all when empty.
            own: Returns the connected ranks on this node, by run.

        Raises:
            NoSuchTargetError: There is no such run or rank anywhere, or more than one run to choose from.
        """
