"""The fleet service: answers the daemons of other nodes, and takes part in their captures."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import grpc

from torchperfd._version import __revision__, __version__
from torchperfd.v1 import control_pb2, fleet_pb2, fleet_pb2_grpc
from torchperfd_daemon.captures import Catalog, Coordinator, Participant
from torchperfd_daemon.errors import TorchperfdError
from torchperfd_daemon.fleet import translate as fleet_translate
from torchperfd_daemon.fleet.remote_capture import RemoteCapture
from torchperfd_daemon.fleet.transport import PeerError
from torchperfd_daemon.fleet.view import INSTANCE_KEY
from torchperfd_daemon.service import SessionService, translate, translate_diagnosis
from torchperfd_daemon.service.node_survey import DeviceWork, PublishedVerdict, survey
from torchperfd_daemon.store import Store

_LONGEST_STACKS_S: Final = 600.0
_FLUSH_S: Final = 1.0


class FleetService(fleet_pb2_grpc.FleetServicer):
    """Answers for this node. Method names are the protocol's.

    Args:
        instance: Of this daemon's process.
        verdict: Returns the published verdict on a run's ranks on this node.
        device_work: Returns the newest steps of one of these ranks on its device.
        on_end_survey: Called after a peer has asked for the end of a run.
    """

    def __init__(
        self,
        store: Store,
        sessions: SessionService,
        coordinator: Coordinator,
        catalog: Catalog,
        instance: str,
        node: str,
        verdict: PublishedVerdict = lambda _: None,
        device_work: DeviceWork = lambda _: None,
        on_end_survey: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._sessions = sessions
        self._coordinator = coordinator
        self._catalog = catalog
        self._instance = instance
        self._node = node
        self._verdict = verdict
        self._device_work = device_work
        self._on_end_survey = on_end_survey

    async def ListRuns(  # noqa: N802
        self, request: fleet_pb2.NodeRunsRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> fleet_pb2.NodeRuns:
        """List the runs with their ranks on this node."""
        return self._here()

    async def Survey(  # noqa: N802
        self, request: fleet_pb2.NodeSurveyRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> fleet_pb2.NodeSurvey:
        """Return the steps of the ranks on this node, and this node's verdicts if requested."""
        answer = survey(self._store, self._verdict, self._device_work, request)
        answer.api.CopyFrom(fleet_translate.api_message())
        answer.version, answer.revision = __version__, __revision__
        answer.instance, answer.node = self._instance, self._node
        if request.at_end and answer.ranks:
            self._on_end_survey()
        return answer

    async def Stacks(  # noqa: N802
        self, request: control_pb2.StacksRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> AsyncIterator[control_pb2.RankStacks]:
        """Stream the stacks of the requested ranks that are on this node."""
        await context.send_initial_metadata(((INSTANCE_KEY, self._instance),))
        wanted = set(request.ranks)
        ranks = [
            rank
            for rank in self._store.runs().get(request.run, [])
            if not wanted or rank.identity.rank in wanted
        ]
        asked = request.timeout_seconds
        seconds = asked if 0 < asked <= _LONGEST_STACKS_S else _LONGEST_STACKS_S
        users = {rank.identity.rank: rank.process.uid for rank in ranks}
        async for answer in self._sessions.stacks_of(ranks, seconds):
            yield translate_diagnosis.rank_stacks_to_message(request.run, users[answer.rank], answer)

    async def Take(  # type: ignore[override]  # noqa: N802 - it writes instead of yielding
        self,
        request_iterator: AsyncIterator[fleet_pb2.TakeOrder],
        context: "grpc.aio.ServicerContext[Any, Any]",
    ) -> None:
        """Take part in a capture that the calling daemon conducts."""
        first = await anext(aiter(request_iterator), None)
        if first is None or not first.HasField("begin"):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a part in a capture begins with begin")
            return
        try:
            fleet_translate.check_version(first.begin.api)
        except PeerError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        await context.write(fleet_pb2.TakeReport(here=self._here()))
        capture = RemoteCapture(self._ranks_of, self._coordinator, self._catalog)
        sender = asyncio.create_task(_send_all(capture, context))
        problem = ""
        try:
            async for order in request_iterator:
                capture.receive(order)
        except TorchperfdError as error:
            problem = str(error)
        finally:
            await capture.end()
            # Not cancelled as long as it writes: gRPC would then never send how the call ended.
            await asyncio.wait((sender,), timeout=_FLUSH_S)
            sender.cancel()
        if problem:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, problem)

    def _ranks_of(self, run: str) -> list[Participant]:
        return [*self._sessions.of_run(run)]

    def _here(self) -> fleet_pb2.NodeRuns:
        self._store.forget_departed()
        return fleet_pb2.NodeRuns(
            api=fleet_translate.api_message(),
            version=__version__,
            revision=__revision__,
            instance=self._instance,
            node=self._node,
            runs=translate.runs_to_messages(self._store.runs()),
        )


async def _send_all(capture: RemoteCapture, context: "grpc.aio.ServicerContext[Any, Any]") -> None:
    # The peer may have disconnected; then the call ends as well.
    with contextlib.suppress(grpc.aio.BaseError):
        while (report := await capture.outgoing.get()) is not None:
            await context.write(report)
