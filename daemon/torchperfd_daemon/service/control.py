"""The control service: what the command line and Python ask of a daemon."""

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any, Final

import grpc

from torchperfd._version import __version__
from torchperfd.v1 import contract, control_pb2, control_pb2_grpc, fleet_pb2, session_pb2
from torchperfd_daemon.captures import Catalog, Coordinator, Participant
from torchperfd_daemon.captures.absent import whole_job
from torchperfd_daemon.collectors.base import Family
from torchperfd_daemon.diagnosis import Verdict
from torchperfd_daemon.errors import NoSuchTargetError, TorchperfdError, UsageError
from torchperfd_daemon.goodput import RunGoodput
from torchperfd_daemon.service import download, live, translate, translate_goodput, translate_stacks
from torchperfd_daemon.service.others import Others
from torchperfd_daemon.service.session import Node, SessionService
from torchperfd_daemon.service.stack_desk import choose
from torchperfd_daemon.service.survey import ranks_of, survey, verdict_on, verdicts
from torchperfd_daemon.service.targets import Targets
from torchperfd_daemon.service.together import merged
from torchperfd_daemon.store import HISTORY_STEPS, Rank, Store

_TIMEOUT_S: Final = 60.0
_STACKS_TIMEOUT_S: Final = 5.0
_NOT_CONNECTED: Final = "is not connected to this daemon; ranks on other nodes need --job and --fleet-peers"

_Wide = (
    control_pb2.ListRunsRequest
    | control_pb2.GetStepsRequest
    | control_pb2.DiagnoseRequest
    | control_pb2.CaptureRequest
)


class ControlService(control_pb2_grpc.ControlServicer):
    """Answers from the store and conducts captures. Method names are the protocol's."""

    def __init__(
        self,
        store: Store,
        sessions: SessionService,
        coordinator: Coordinator,
        catalog: Catalog,
        node: Node,
        others: Others,
        families: Callable[[], Iterable[Family]] = tuple,
        goodput: Callable[[str], Awaitable[list[RunGoodput]]] | None = None,
        verdict: Callable[[str], Verdict | None] = lambda _: None,
    ) -> None:
        self._store = store
        self._catalog = catalog
        self._sessions = sessions
        self._targets = Targets(store, sessions.of_run)
        self._coordinator = coordinator
        self._node = node
        self._others = others
        self._families = families
        self._goodput = goodput
        self._verdict = verdict

    async def GetInfo(  # noqa: N802
        self, request: control_pb2.GetInfoRequest, context: Any
    ) -> control_pb2.GetInfoResponse:
        """Say who this daemon is and what it speaks."""
        return control_pb2.GetInfoResponse(
            api=session_pb2.ApiRange(min=contract.API_MIN, max=contract.API_MAX),
            version=__version__,
            pid=os.getpid(),
            node=self._node.name,
            metrics_url=self._node.metrics_url,
            captures_dir=str(self._node.captures_dir),
            clients=self._store.connected(),
        )

    async def ListRuns(  # noqa: N802
        self, request: control_pb2.ListRunsRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> control_pb2.ListRunsResponse:
        """List runs with their ranks, on this node or on all."""
        await self._sessions.pulses.freshen(ranks_of(self._store, "", request.job))
        own = [run for run in translate.runs(self._store.runs()) if request.job in ("", run.job_name)]
        try:
            if self._is_of_fleet(request):
                return await self._others.runs(own, request.job)
            if not own:
                live.check_found("", request.job)
        except TorchperfdError as error:
            await context.abort(_status_of(error), str(error))
        return control_pb2.ListRunsResponse(runs=own)

    async def GetRun(  # noqa: N802
        self, request: control_pb2.GetRunRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> control_pb2.GetRunResponse:
        """Return a run's whole account, and the verdict on it; before one has held, on its mean step."""
        ranks = self._store.runs().get(request.run)
        if not ranks:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no run {request.run} on this node")
            raise AssertionError("abort raises")
        verdict = verdict_on(request.run, ranks, self._verdict)
        return control_pb2.GetRunResponse(
            run=request.run,
            ranks=[translate.rank_account(rank) for rank in ranks],
            verdict=translate.verdict_message(verdict),
        )

    async def GetSteps(  # noqa: N802
        self, request: control_pb2.GetStepsRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> control_pb2.GetStepsResponse:
        """Return the newest training steps of ranks, on this node or on all."""
        await self._sessions.pulses.freshen(ranks_of(self._store, request.run, request.job))
        try:
            if self._is_of_fleet(request):
                newest = request.newest or HISTORY_STEPS
                asked = fleet_pb2.NodeSurveyRequest(run=request.run, job=request.job, newest=newest)
                return await self._others.steps(asked, survey(self._store, self._verdict, asked))
            return live.newest_steps(self._store, request)
        except TorchperfdError as error:
            await context.abort(_status_of(error), str(error))
            raise AssertionError("abort raises") from error

    async def Diagnose(  # noqa: N802
        self, request: control_pb2.DiagnoseRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> control_pb2.DiagnoseResponse:
        """Return one verdict on each run, of its ranks on this node or on all."""
        ranks = ranks_of(self._store, request.run, request.job)
        await self._sessions.pulses.freshen(ranks)
        try:
            if self._is_of_fleet(request):
                asked = fleet_pb2.NodeSurveyRequest(run=request.run, job=request.job, verdicts=True)
                return await self._others.diagnose(asked, survey(self._store, self._verdict, asked))
            if not ranks:
                live.check_found(request.run, request.job)
            return control_pb2.DiagnoseResponse(verdicts=verdicts(ranks, self._verdict))
        except TorchperfdError as error:
            await context.abort(_status_of(error), str(error))
            raise AssertionError("abort raises") from error

    async def GetReadings(  # noqa: N802
        self, request: control_pb2.GetReadingsRequest, context: Any
    ) -> control_pb2.GetReadingsResponse:
        """Return what the collectors have measured last."""
        return live.readings(self._families(), request)

    async def GetGoodput(  # noqa: N802
        self, request: control_pb2.GetGoodputRequest, context: Any
    ) -> control_pb2.GetGoodputResponse:
        """Say what rank-seconds went to, also of runs that have ended."""
        runs = await self._goodput(request.run) if self._goodput is not None else []
        return control_pb2.GetGoodputResponse(runs=[translate_goodput.run_message(run) for run in runs])

    async def Capture(  # noqa: N802
        self, request: control_pb2.CaptureRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> AsyncIterator[control_pb2.CaptureProgress]:
        """Capture steps of a run, or of all runs, telling each change."""
        try:
            translate.check_capture(request)
            if self._is_of_fleet(request):
                async for message in self._capture_fleet(request):
                    yield message
                return
            if request.all_runs:
                async for message in merged(self._each_run(request)):
                    yield message
                return
            run = self._targets.run(request.run, request.job)
            async for message in self._capture(request, run, lambda: self._here(run, request)):
                yield message
        except TorchperfdError as error:
            await context.abort(_status_of(error), str(error))

    async def CancelCapture(  # noqa: N802
        self, request: control_pb2.CancelCaptureRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> control_pb2.CancelCaptureResponse:
        """Give a capture up that is queued or in progress."""
        try:
            self._coordinator.cancel(request.capture_id)
        except NoSuchTargetError as error:
            await context.abort(grpc.StatusCode.NOT_FOUND, str(error))
        return control_pb2.CancelCaptureResponse()

    async def Download(  # noqa: N802
        self, request: control_pb2.DownloadRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> AsyncIterator[control_pb2.DownloadPiece]:
        """Send a capture's file, piece by piece."""
        try:
            async for piece in download.pieces(self._catalog, request):
                yield piece
        except TorchperfdError as error:
            await context.abort(_status_of(error), str(error))

    async def Stacks(  # noqa: N802
        self, request: control_pb2.StacksRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> AsyncIterator[control_pb2.RankStacks]:
        """Tell where every thread of a run's ranks is, on this node or on all, or why not."""
        request.timeout_seconds = request.timeout_seconds or _STACKS_TIMEOUT_S
        try:
            if request.fleet:
                async for message in self._stacks_of_fleet(request):
                    yield message
                return
            ranks = choose(self._store, request.run, request.ranks)
        except TorchperfdError as error:
            await context.abort(_status_of(error), str(error))
        async for message in self._stacks(ranks, request.timeout_seconds):
            yield message

    def _is_of_fleet(self, request: _Wide) -> bool:
        """Return whether all nodes are meant: of a job they are where any others are known."""
        return request.fleet or (bool(request.job) and self._others.known)

    async def _stacks(self, ranks: Sequence[Rank], seconds: float) -> AsyncIterator[control_pb2.RankStacks]:
        async for told in self._sessions.stacks_of(ranks, seconds):
            yield translate_stacks.rank_stacks_message(ranks[0].identity.run, told)

    async def _stacks_of_fleet(
        self, request: control_pb2.StacksRequest
    ) -> AsyncIterator[control_pb2.RankStacks]:
        request.run = await self._others.choose(request.run, self._targets.runs())
        wanted = set(request.ranks)
        here = [
            rank
            for rank in self._store.runs().get(request.run, [])
            if not wanted or rank.identity.rank in wanted
        ]
        found = False
        async for message in merged(
            [self._stacks(here, request.timeout_seconds), self._others.stacks(request)]
        ):
            found = found or message.HasField("identity")
            yield message
        if not found:
            raise NoSuchTargetError(
                f"run {request.run} has no such rank on any node that answers",
                "`torchperfd ps --fleet` lists those there are",
            )

    async def _capture_fleet(
        self, request: control_pb2.CaptureRequest
    ) -> AsyncIterator[control_pb2.CaptureProgress]:
        if request.all_runs:
            raise UsageError("the captures of all runs are of one node", "leave --all or --fleet out")

        def own() -> dict[str, list[Participant]]:
            return {run: [*self._sessions.of_run(run)] for run in self._targets.runs(request.job)}

        async with self._others.gather(request.run, request.ranks, own, request.job) as gathered:
            async for message in self._capture(request, gathered.run, lambda: gathered.participants):
                message.unreachable.extend(gathered.unreachable)
                for rank in message.ranks:
                    node = gathered.elsewhere.get(rank.rank, "")
                    rank.node = translate.node_of_trace(message.directory, rank.file, node)
                yield message

    async def _capture(
        self, request: control_pb2.CaptureRequest, run: str, choose_ranks: Callable[[], list[Participant]]
    ) -> AsyncIterator[control_pb2.CaptureProgress]:
        async for progress in self._coordinator.capture(
            run,
            choose_ranks(),
            translate.capture_options(request.options),
            request.timeout_seconds or _TIMEOUT_S,
            when=translate.when(request),
            queue=request.queue,
            choose_again=choose_ranks,
        ):
            yield translate.capture_progress(progress)

    def _here(self, run: str, request: control_pb2.CaptureRequest) -> list[Participant]:
        """Return the ranks to capture: by default all of the job, so that a missing one fails by name."""
        sessions = self._targets.ranks(run, request.ranks)
        if request.options.kind == session_pb2.CAPTURE_KIND_MEMORY:
            for session in sessions:
                if not session.makes_kinds:
                    raise TorchperfdError(
                        f"the torchperfd of rank {session.rank} makes traces only",
                        "install the same version on both sides",
                    )
        found: dict[int, Participant] = {session.rank: session for session in sessions}
        wanted = [*found] if request.ranks else ()
        return whole_job(run, wanted, found, _NOT_CONNECTED, self._coordinator)

    def _each_run(
        self, request: control_pb2.CaptureRequest
    ) -> list[AsyncIterator[control_pb2.CaptureProgress]]:
        """Return a capture of each run; what one of them cannot do ends itself only.

        Raises:
            NoSuchTargetError: There is no run.
        """

        async def tried(run: str) -> AsyncIterator[control_pb2.CaptureProgress]:
            try:
                async for message in self._capture(request, run, lambda: self._here(run, request)):
                    yield message
            except TorchperfdError as error:
                yield control_pb2.CaptureProgress(
                    run=run, state=control_pb2.CAPTURE_STATE_FAILED, reason=str(error)
                )

        runs = self._targets.runs()
        if not runs:
            self._targets.run("")
        return [tried(run) for run in runs]


def _status_of(error: TorchperfdError) -> grpc.StatusCode:
    if isinstance(error, NoSuchTargetError):
        return grpc.StatusCode.NOT_FOUND
    if isinstance(error, UsageError):
        return grpc.StatusCode.INVALID_ARGUMENT
    return grpc.StatusCode.FAILED_PRECONDITION
