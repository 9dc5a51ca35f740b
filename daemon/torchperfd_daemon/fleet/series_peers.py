"""Answers a daemon's questions about all nodes from series; those about its own job go to the peers."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TypeVar

from torchperfd.v1 import control_pb2, fleet_pb2
from torchperfd_daemon.captures.rank_attempts import Participant
from torchperfd_daemon.errors import DaemonUnreachableError
from torchperfd_daemon.fleet.series_view import SeriesView
from torchperfd_daemon.fleet.view import FleetView
from torchperfd_daemon.service.targets import MayCommand, RankSelection, Redact

_Answer = TypeVar("_Answer")


class SeriesPeers:
    """A ``PeerDirectory`` for a daemon with a store of series.

    Series have what every caller of the daemon may see, and nothing that is for the user of a run only. What
    acts on ranks asks the peers.
    """

    def __init__(self, live: FleetView, view: SeriesView) -> None:
        self._live = live
        self._view = view

    @property
    def known(self) -> bool:
        """Whether there are peers: a job's own questions are for them."""
        return self._live.known

    async def runs(
        self, own: Sequence[control_pb2.Run], may: MayCommand, job: str = ""
    ) -> control_pb2.ListRunsResponse:
        """Return the runs that have series, and those of this node that have none yet."""

        def of_series() -> control_pb2.ListRunsResponse:
            answer = self._view.runs_with_ranks(job)
            there = {run.run for run in answer.runs}
            answer.runs.extend(run for run in own if run.run not in there)
            return answer

        return await self._read(of_series) or await self._live.runs(own, may, job)

    async def steps(
        self, asked: fleet_pb2.NodeSurveyRequest, own: fleet_pb2.NodeSurvey, may: MayCommand
    ) -> control_pb2.GetStepsResponse:
        """Return the present mean steps of ranks."""
        if not self._is_own(asked, own):
            request = control_pb2.GetStepsRequest(run=asked.run, job=asked.job)
            if found := await self._read(lambda: self._view.GetSteps(request)):
                return found
        return await self._live.steps(asked, own, may)

    async def diagnose(
        self,
        asked: fleet_pb2.NodeSurveyRequest,
        own: fleet_pb2.NodeSurvey,
        redact: Redact,
        may: MayCommand,
        seconds: float | None = None,
    ) -> control_pb2.DiagnoseResponse:
        """Return one verdict on each run."""
        if not self._is_own(asked, own):
            request = control_pb2.DiagnoseRequest(run=asked.run, job=asked.job)
            if found := await self._read(lambda: self._view.Diagnose(request)):
                return found
        return await self._live.diagnose(asked, own, redact, may, seconds)

    async def choose(self, run: str, own: Sequence[str], may: MayCommand) -> str:
        """Return the name of the run to act on, as the peers know it."""
        return await self._live.choose(run, own, may)

    def stacks(
        self, request: control_pb2.StacksRequest, may: MayCommand
    ) -> AsyncIterator[control_pb2.RankStacks]:
        """Yield the stacks of ranks on the peers' nodes."""
        return self._live.stacks(request, may)

    def gather(
        self,
        run: str,
        ranks: Sequence[int],
        own: Callable[[], dict[str, list[Participant]]],
        may: MayCommand,
        job: str = "",
    ) -> AbstractAsyncContextManager[RankSelection]:
        """Select ranks for a capture on the peers' nodes."""
        return self._live.gather(run, ranks, own, may, job)

    def _is_own(self, asked: fleet_pb2.NodeSurveyRequest, own: fleet_pb2.NodeSurvey) -> bool:
        """Return whether a question is about one run or job of which this node has ranks, or its end."""
        return asked.at_end or (self._live.known and bool(asked.run or asked.job) and bool(own.ranks))

    async def _read(self, question: Callable[[], _Answer]) -> _Answer | None:
        """Return the answer of the store; None if it cannot be reached, and there are peers to ask."""
        try:
            return await asyncio.to_thread(question)
        except DaemonUnreachableError:
            if not self._live.known:
                raise
            return None
