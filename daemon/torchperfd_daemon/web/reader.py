"""The parts of the daemon that the HTTP interface reads, and the rights with which it does."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torchperfd.v1 import control_pb2
from torchperfd_daemon.captures import Catalog, Coordinator
from torchperfd_daemon.collectors.base import Family, Sampler
from torchperfd_daemon.goodput import RunGoodput
from torchperfd_daemon.service import ControlService
from torchperfd_daemon.service.translate_account import run_goodput_from_message
from torchperfd_daemon.store import Rank, RankIdentity, Store
from torchperfd_daemon.views.captures import whole_name
from torchperfd_daemon.web.access import Access

_GOODPUT_S: Final = 5.0


def _no_gpu(_: RankIdentity) -> str:
    return ""


def _watch_none(_: frozenset[str]) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Parts:
    """What the interface reads.

    Attributes:
        node: This node's name.
        instance: Differs between any two daemons.
        families: Returns the collectors' newest values.
        gpu_of: Returns the index of a rank's GPU on this node; empty if it is not known.
        watch: Called with the runs whose steps a page follows: at each change, and once per second while
            there are any.
    """

    store: Store
    control: ControlService
    catalog: Catalog
    coordinator: Coordinator
    node: str
    instance: str
    fleet: bool = False
    families: Callable[[], Iterable[Family]] = tuple
    samplers: Sequence[Sampler] = ()
    gpu_of: Callable[[RankIdentity], str] = _no_gpu
    watch: Callable[[frozenset[str]], None] = _watch_none


class Reader:
    """Asks the control service, with the rights of a caller."""

    def __init__(self, parts: Parts, clock: Callable[[], float] = time.monotonic) -> None:
        self._parts = parts
        self._clock = clock
        self._goodput: tuple[float, list[RunGoodput]] = (-_GOODPUT_S, [])

    async def run_name(self, given: str, access: Access, *, fleet: bool = False) -> str:
        """Return the whole name of a run, by a unique prefix.

        Raises:
            NoSuchTargetError: Several runs begin so.
        """
        if given in self._parts.store.runs():
            return given
        listed = await self.runs(access, fleet=fleet)
        return whole_name(given, (run.run for run in listed.runs), "run")

    async def runs(self, access: Access, *, fleet: bool = False) -> control_pb2.ListRunsResponse:
        """Return the runs of this node, or of all nodes."""
        return await self._parts.control.ListRuns(control_pb2.ListRunsRequest(fleet=fleet), _as(access))

    async def steps(
        self, run: str, newest: int, access: Access, *, ranks: Sequence[int] = (), fleet: bool = False
    ) -> control_pb2.GetStepsResponse:
        """Return the newest steps of a run's ranks."""
        request = control_pb2.GetStepsRequest(run=run, ranks=ranks, newest=newest, fleet=fleet)
        return await self._parts.control.GetSteps(request, _as(access))

    async def verdicts(
        self, run: str, access: Access, *, fleet: bool = False
    ) -> control_pb2.DiagnoseResponse:
        """Return one verdict on each run, or on one."""
        request = control_pb2.DiagnoseRequest(run=run, fleet=fleet)
        return await self._parts.control.Diagnose(request, _as(access))

    async def goodput(self, run: str = "") -> list[RunGoodput]:
        """Return how rank-seconds were spent, of one run or of all; for all at most five seconds old."""
        read_at, kept = self._goodput
        if not run and self._clock() - read_at < _GOODPUT_S:
            return kept
        request = control_pb2.GetGoodputRequest(run=run)
        answer = await self._parts.control.GetGoodput(request, _as(Access.STRANGER))
        found = [run_goodput_from_message(message) for message in answer.runs]
        if not run:
            self._goodput = self._clock(), found
        return found

    def ranks(self, run: str) -> list[Rank]:
        """Return the ranks of a run on this node."""
        return self._parts.store.runs().get(run, [])


def _as(access: Access) -> Any:
    """Return a call with the rights of a caller, in place of gRPC's context."""
    return access.call()
