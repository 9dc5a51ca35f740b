"""The control service: what the command line and Python ask of a daemon."""

import os
from collections.abc import AsyncIterator
from typing import Any

import grpc

from torchperfd._version import __version__
from torchperfd.v1 import contract, control_pb2, control_pb2_grpc, session_pb2
from torchperfd_daemon.captures import Catalog, Coordinator, Participant
from torchperfd_daemon.diagnosis import RankProfile, diagnose
from torchperfd_daemon.errors import NoSuchTargetError, TorchperfdError, UsageError
from torchperfd_daemon.service import download, translate, translate_stacks
from torchperfd_daemon.service.session import Node, SessionService
from torchperfd_daemon.service.stack_desk import choose
from torchperfd_daemon.store import Rank, Store

_MOST_CAPTURE_STEPS = 1000


class ControlService(control_pb2_grpc.ControlServicer):
    """Answers from the store and conducts captures. Method names are the protocol's."""

    def __init__(
        self,
        store: Store,
        sessions: SessionService,
        coordinator: Coordinator,
        catalog: Catalog,
        node: Node,
    ) -> None:
        self._store = store
        self._catalog = catalog
        self._sessions = sessions
        self._coordinator = coordinator
        self._node = node

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
        self, request: control_pb2.ListRunsRequest, context: Any
    ) -> control_pb2.ListRunsResponse:
        """List runs with their ranks on this node."""
        self._store.forget_departed()
        return control_pb2.ListRunsResponse(
            runs=[
                control_pb2.Run(
                    run=run,
                    job_name=ranks[0].identity.job_name,
                    world_size=max(rank.identity.world_size for rank in ranks),
                    ranks=[translate.rank_status(rank) for rank in ranks],
                )
                for run, ranks in self._store.runs().items()
            ]
        )

    async def GetRun(  # noqa: N802
        self, request: control_pb2.GetRunRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> control_pb2.GetRunResponse:
        """Return a run's whole account, and the verdict on all of it."""
        ranks = self._store.runs().get(request.run)
        if not ranks:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no run {request.run} on this node")
            raise AssertionError("abort raises")
        verdict = diagnose(request.run, [_whole_profile(rank) for rank in ranks])
        return control_pb2.GetRunResponse(
            run=request.run,
            ranks=[translate.rank_account(rank) for rank in ranks],
            verdict=translate.verdict_message(verdict),
        )

    async def Capture(  # noqa: N802
        self, request: control_pb2.CaptureRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> AsyncIterator[control_pb2.CaptureProgress]:
        """Capture the next steps of a run, telling each change."""
        run, participants = await self._targets(request, context)
        options = translate.capture_options(request.options)
        if not 1 <= options.steps <= _MOST_CAPTURE_STEPS:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"steps must be 1 to {_MOST_CAPTURE_STEPS}")
        try:
            async for progress in self._coordinator.capture(
                run, participants, options, request.timeout_seconds or 60.0
            ):
                yield translate.capture_progress(progress)
        except TorchperfdError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))

    async def Download(  # noqa: N802
        self, request: control_pb2.DownloadRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> AsyncIterator[control_pb2.DownloadPiece]:
        """Send a capture's file, piece by piece."""
        try:
            async for piece in download.pieces(self._catalog, request):
                yield piece
        except NoSuchTargetError as error:
            await context.abort(grpc.StatusCode.NOT_FOUND, str(error))
        except UsageError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except TorchperfdError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))

    async def Stacks(  # noqa: N802
        self, request: control_pb2.StacksRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> AsyncIterator[control_pb2.RankStacks]:
        """Tell where every thread of a run's ranks on this node is, or why not."""
        try:
            ranks = choose(self._store, request.run, request.ranks)
        except TorchperfdError as error:
            await context.abort(grpc.StatusCode.NOT_FOUND, str(error))
        sessions = {session.record: session for session in self._sessions.of_run(ranks[0].identity.run)}
        targets = [(rank, sessions.get(rank)) for rank in ranks]
        async for told in self._sessions.stacks.stacks(targets, request.timeout_seconds or 5.0):
            yield translate_stacks.rank_stacks_message(ranks[0].identity.run, told)

    async def _targets(
        self, request: control_pb2.CaptureRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> tuple[str, list[Participant]]:
        connected = [run for run in self._store.runs() if self._sessions.of_run(run)]
        run = request.run
        if not run:
            if len(connected) != 1:
                found = f"{len(connected)} runs: {', '.join(connected)}" if connected else "no run"
                hint = "choose one with --run" if connected else "start one with `torchperfd run`"
                await context.abort(grpc.StatusCode.NOT_FOUND, f"this node has {found}; {hint}")
            run = connected[0]
        sessions: list[Participant] = list(self._sessions.of_run(run))
        if not sessions:
            await context.abort(
                grpc.StatusCode.NOT_FOUND, f"no run {run} on this node; `torchperfd ps` lists those there are"
            )
        if request.ranks:
            there = {session.rank for session in sessions}
            missing = sorted(set(request.ranks) - there)
            if missing:
                await context.abort(
                    grpc.StatusCode.NOT_FOUND,
                    f"run {run} has no rank {', '.join(map(str, missing))} on this node;"
                    f" it has {', '.join(map(str, sorted(there)))}",
                )
            sessions = [session for session in sessions if session.rank in request.ranks]
        return run, sessions


def _whole_profile(rank: Rank) -> RankProfile:
    train = rank.totals.train
    return RankProfile(
        rank=rank.identity.rank,
        node=rank.identity.node,
        steps=train.steps,
        step_seconds=train.ns / train.steps / 1e9 if train.steps else 0.0,
        phase_seconds={
            name: total.ns / train.steps / 1e9 for name, total in train.phases.items() if train.steps
        },
    )
