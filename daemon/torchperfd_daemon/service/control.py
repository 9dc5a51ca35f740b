"""The control service: requests of the command line and of Python."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any, Final

from torchperfd._version import __revision__, __version__
from torchperfd.v1 import contract, control_pb2, control_pb2_grpc, fleet_pb2, session_pb2
from torchperfd_daemon.captures.catalog import Catalog
from torchperfd_daemon.captures.coordinator import Coordinator
from torchperfd_daemon.collectors.base import Family
from torchperfd_daemon.errors import NoSuchTargetError, UsageError
from torchperfd_daemon.goodput.totals import RunGoodput
from torchperfd_daemon.observer.mean_step import loader_advice_of
from torchperfd_daemon.service import caller_captures, node_survey, translate, translate_diagnosis
from torchperfd_daemon.service.caller_captures import Captures
from torchperfd_daemon.service.node_survey import (
    DeviceWork,
    EndVerdicts,
    PublishedVerdict,
    RecentCollections,
    note_unseen,
    ranks_of,
    survey,
    verdicts,
)
from torchperfd_daemon.service.permissions import AuditLine, Permissions, Rights, subject_of
from torchperfd_daemon.service.session import Node, SessionService
from torchperfd_daemon.service.stack_requests import choose
from torchperfd_daemon.service.targets import PeerDirectory, Targets, merged
from torchperfd_daemon.store.model import HISTORY_STEPS
from torchperfd_daemon.store.store import Rank, Store

_STACKS_TIMEOUT_S: Final = 5.0
_MAX_STACKS_S: Final = 600.0

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
        others: PeerDirectory,
        families: Callable[[], Iterable[Family]] = tuple,
        goodput: Callable[[str], Awaitable[list[RunGoodput]]] | None = None,
        verdict: PublishedVerdict = lambda _: None,
        device_work: DeviceWork = lambda _: None,
        collections: RecentCollections = lambda _: (),
        *,
        permissions: Permissions,
    ) -> None:
        self._store = store
        self._catalog = catalog
        self._sessions = sessions
        self._permissions = permissions
        self._coordinator = coordinator
        self._node = node
        self._others = others
        self._captures = Captures(store, sessions.of_run, coordinator, others)
        self._families = families
        self._goodput = goodput
        self._end_verdicts = EndVerdicts(others, self._survey)
        self._verdict = verdict
        self._device_work = device_work
        self._collections = collections

    async def GetInfo(self, request: control_pb2.GetInfoRequest, context: Any) -> control_pb2.GetInfoResponse:
        """Return the daemon's identity and protocol versions."""
        return control_pb2.GetInfoResponse(
            api=session_pb2.ApiRange(min=contract.API_MIN, max=contract.API_MAX),
            version=__version__,
            revision=__revision__,
            pid=os.getpid(),
            node=self._node.name,
            metrics_url=self._node.metrics_url,
            captures_dir=str(self._node.captures_dir),
            clients=self._store.connected(),
        )

    async def ListRuns(
        self, request: control_pb2.ListRunsRequest, context: Any
    ) -> control_pb2.ListRunsResponse:
        """List runs with their ranks, on this node or on all."""
        own = [
            run for run in translate.runs_to_messages(self._store.runs()) if request.job in ("", run.job_name)
        ]
        response = control_pb2.ListRunsResponse(runs=own)
        rights = self._permissions.of(context)
        if self._is_of_fleet(request):
            response = await self._others.runs(own, rights.may_command, request.job)
        elif not own:
            node_survey.check_found("", request.job)
        for run in response.runs:
            for status in run.ranks:
                rights.redact_status(status)
        return response

    async def GetRun(self, request: control_pb2.GetRunRequest, context: Any) -> control_pb2.GetRunResponse:
        """Return a run's totals and its verdict; before one is published, the verdict on its mean step.

        At the end of a run of which this node has not all ranks, the other nodes are asked for the verdict.
        """
        rights = self._permissions.of(context)
        runs = self._store.runs()
        request.run = rights.own_name(request.run, runs)
        ranks = runs.get(request.run)
        if not ranks:
            raise NoSuchTargetError(f"no run {request.run} on this node")
        users = [rank.process.uid for rank in ranks]
        of_job = None
        is_part = max(rank.identity.world_size for rank in ranks) > len(ranks)
        if request.end_seconds > 0 and is_part and all(map(rights.may_command, users)):
            of_job = await self._end_verdicts.of_job(request.run, request.end_seconds, rights, runs.keys())
        response = control_pb2.GetRunResponse(
            run=request.run,
            ranks=[translate.rank_account_to_message(rank) for rank in ranks],
            verdict=of_job or verdicts(ranks, self._verdict)[0],
            loader_advice=None if (advice := loader_advice_of(ranks)) is None else advice.to_message(),
        )
        if request.end_seconds > 0 and is_part and of_job is None:
            note_unseen(response.verdict, ranks)
        rights.redact_verdict(response.verdict, users)
        for account, uid in zip(response.ranks, users, strict=True):
            rights.redact_account(account, uid)
        return response

    async def GetSteps(
        self, request: control_pb2.GetStepsRequest, context: Any
    ) -> control_pb2.GetStepsResponse:
        """Return the newest training steps of ranks, on this node or on all."""
        rights = self._permissions.of(context)
        if self._is_of_fleet(request):
            newest = request.newest or HISTORY_STEPS
            asked = fleet_pb2.NodeSurveyRequest(run=request.run, job=request.job, newest=newest)
            response = await self._others.steps(asked, self._survey(asked), rights.may_command)
        else:
            response = node_survey.newest_steps(self._store, request, self._device_work, self._collections)
        for rank in response.ranks:
            rights.redact_status(rank.status)
        return response

    async def Diagnose(
        self, request: control_pb2.DiagnoseRequest, context: Any
    ) -> control_pb2.DiagnoseResponse:
        """Return one verdict on each run, of its ranks on this node or on all."""
        rights = self._permissions.of(context)
        if self._is_of_fleet(request):
            asked = fleet_pb2.NodeSurveyRequest(run=request.run, job=request.job, verdicts=True)
            own = self._survey(asked)
            return await self._others.diagnose(asked, own, rights.redact_verdict, rights.may_command)
        ranks = ranks_of(self._store, request.run, request.job)
        if not ranks:
            node_survey.check_found(request.run, request.job)
        response = control_pb2.DiagnoseResponse(verdicts=verdicts(ranks, self._verdict))
        runs = self._store.runs()
        for verdict in response.verdicts:
            rights.redact_verdict(verdict, [rank.process.uid for rank in runs[verdict.run]])
        return response

    async def GetReadings(
        self, request: control_pb2.GetReadingsRequest, context: Any
    ) -> control_pb2.GetReadingsResponse:
        """Return the collectors' newest values."""
        return node_survey.readings(self._families(), request)

    async def GetGoodput(
        self, request: control_pb2.GetGoodputRequest, context: Any
    ) -> control_pb2.GetGoodputResponse:
        """Return how rank-seconds were spent, also for runs that have ended."""
        runs = await self._goodput(request.run) if self._goodput is not None else []
        return control_pb2.GetGoodputResponse(
            runs=[translate_diagnosis.run_goodput_to_message(run) for run in runs]
        )

    async def Capture(
        self, request: control_pb2.CaptureRequest, context: Any
    ) -> AsyncIterator[control_pb2.CaptureProgress]:
        """Capture steps of a run, or of all runs, and stream each change."""
        rights = self._permissions.of(context)
        targets = self._targets(rights)
        with rights.request("capture", subject_of(request)) as line:
            translate.check_capture(request)
            if self._is_of_fleet(request):
                messages = self._captures.of_fleet(request, targets, rights, line)
            elif request.all_runs:
                messages = merged(self._captures.of_each_run(request, targets, rights))
                line.drop()  # each run has one of its own
            else:
                messages = self._captures.of_run(request, targets, line)
            async for message in messages:
                yield message

    async def CancelCapture(
        self, request: control_pb2.CancelCaptureRequest, context: Any
    ) -> control_pb2.CancelCaptureResponse:
        """Cancel a capture that is queued or in progress."""
        rights = self._permissions.of(context)
        with rights.request("cancellation", f"capture {request.capture_id}") as line:
            users = self._coordinator.users(request.capture_id)
            rights.check(f"capture {request.capture_id[:80]}", users)
            self._coordinator.cancel(request.capture_id)
            line.allowed(users)
        return control_pb2.CancelCaptureResponse()

    async def Download(
        self, request: control_pb2.DownloadRequest, context: Any
    ) -> AsyncIterator[control_pb2.DownloadPiece]:
        """Send a capture's file, piece by piece."""
        rights = self._permissions.of(context)
        with rights.request("download", f"{request.file} of capture {request.capture_id}") as line:
            async for piece in caller_captures.download_pieces(self._catalog, request, rights, line):
                yield piece

    async def ListCaptures(
        self, request: control_pb2.ListCapturesRequest, context: Any
    ) -> AsyncIterator[control_pb2.ListedCapture]:
        """Send the captures that the caller may read, newest first."""
        rights = self._permissions.of(context)
        # On a thread: it reads the disk.
        found = await asyncio.to_thread(
            lambda: [*caller_captures.list_captures(self._catalog, request, rights)]
        )
        for message in found:
            yield message

    async def PinCapture(
        self, request: control_pb2.PinCaptureRequest, context: Any
    ) -> control_pb2.PinCaptureResponse:
        """Protect a capture from removal, or no longer."""
        await self._change_kept("pin" if request.pinned else "unpin", caller_captures.pin, request, context)
        return control_pb2.PinCaptureResponse()

    async def RemoveCapture(
        self, request: control_pb2.RemoveCaptureRequest, context: Any
    ) -> control_pb2.RemoveCaptureResponse:
        """Remove a capture, or find out whether it may be removed."""
        action = "check for removal" if request.dry_run else "removal"
        await self._change_kept(action, caller_captures.remove, request, context)
        return control_pb2.RemoveCaptureResponse()

    async def _change_kept(
        self, action: str, change: Callable[..., set[int]], request: Any, context: Any
    ) -> None:
        rights = self._permissions.of(context)
        with rights.request(action, f"capture {request.capture_id}") as line:
            line.allowed(await asyncio.to_thread(change, self._catalog, request, rights))

    async def Stacks(
        self, request: control_pb2.StacksRequest, context: Any
    ) -> AsyncIterator[control_pb2.RankStacks]:
        """Stream the stacks of a run's ranks, on this node or on all, or why they are missing."""
        rights = self._permissions.of(context)
        if not 0 < request.timeout_seconds <= _MAX_STACKS_S:
            request.timeout_seconds = _STACKS_TIMEOUT_S
        action = "stacks by signal" if request.allow_signal else "stacks"
        with rights.request(action, subject_of(request)) as line:
            if request.fleet:
                messages = self._stacks_of_fleet(request, rights, line)
            else:
                ranks = choose(self._store, request.run, request.ranks, rights)
                line.allowed(rank.process.uid for rank in ranks)
                messages = self._stacks(ranks, request.timeout_seconds, request.allow_signal)
            async for message in messages:
                yield message

    def _is_of_fleet(self, request: _Wide) -> bool:
        """Return whether all nodes are meant: of a job they are where any others are known."""
        return request.fleet or (bool(request.job) and self._others.known)

    def _survey(self, asked: fleet_pb2.NodeSurveyRequest) -> fleet_pb2.NodeSurvey:
        return survey(self._store, self._verdict, self._device_work, asked)

    async def _stacks(
        self, ranks: Sequence[Rank], seconds: float, allow_signal: bool = False
    ) -> AsyncIterator[control_pb2.RankStacks]:
        users = {rank.identity.rank: rank.process.uid for rank in ranks}
        async for response in self._sessions.stacks_of(ranks, seconds, allow_signal=allow_signal):
            yield translate_diagnosis.rank_stacks_to_message(
                ranks[0].identity.run, users[response.rank], response
            )

    def _targets(self, rights: Rights) -> Targets:
        return Targets(self._store, self._sessions.of_run, rights)

    async def _stacks_of_fleet(
        self, request: control_pb2.StacksRequest, rights: Rights, line: AuditLine
    ) -> AsyncIterator[control_pb2.RankStacks]:
        if request.allow_signal:
            # Another node's daemon does not know the caller, so it could not refuse another user's rank.
            raise UsageError("signals are sent on this node only", "leave --fleet or --signal out")
        run = await self._others.choose(request.run, self._targets(rights).runs(), rights.may_command)
        request.run = rights.own_name(run, self._store.runs())
        wanted = set(request.ranks)
        here = [
            rank
            for rank in self._store.runs().get(request.run, [])
            if (not wanted or rank.identity.rank in wanted) and rights.may_command(rank.process.uid)
        ]
        # Each node sends the caller's ranks only.
        line.allowed([rights.caller.uid] if not rights.is_admin else (rank.process.uid for rank in here))
        found = False
        elsewhere = self._others.stacks(request, rights.may_command)
        async for message in merged([self._stacks(here, request.timeout_seconds), elsewhere]):
            found = found or message.HasField("identity")
            yield message
        if not found:
            raise NoSuchTargetError(
                f"run {request.run} has no such rank on any node that answers",
                "`torchperfd ps --fleet` lists those there are",
            )
