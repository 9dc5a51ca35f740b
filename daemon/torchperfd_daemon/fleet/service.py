"""The fleet service: answers the daemons of other nodes, and takes part in their captures."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Final

import grpc

from torchperfd._version import __revision__, __version__
from torchperfd.v1 import control_pb2, fleet_pb2, fleet_pb2_grpc
from torchperfd_daemon.captures.attempt import MAX_STEPS
from torchperfd_daemon.captures.catalog import Catalog
from torchperfd_daemon.captures.coordinator import Coordinator
from torchperfd_daemon.captures.manifest import (
    CaptureRecord,
    CaptureState,
    RankTrace,
    first_reason,
    overall_state,
)
from torchperfd_daemon.captures.rank_attempts import Ack, Participant, PendingAttempts, RankAttempt, failure
from torchperfd_daemon.errors import TorchperfdError, UsageError
from torchperfd_daemon.fleet import translate as fleet_translate
from torchperfd_daemon.fleet.transport import PeerError
from torchperfd_daemon.fleet.view import INSTANCE_KEY
from torchperfd_daemon.service import translate, translate_diagnosis
from torchperfd_daemon.service.node_survey import DeviceWork, PublishedVerdict, survey
from torchperfd_daemon.service.session import SessionService
from torchperfd_daemon.store.store import Store

log = logging.getLogger("torchperfd.fleet")

TRIGGER: Final = "fleet"
_OUTGOING: Final = 4096
_GRACE_S: Final = 5.0
_LAST_STEP: Final = 2**62
_GONE: Final = "the connection to the daemon that conducts the capture is lost"


class RemoteCapture:
    """One node's part in one capture.

    Args:
        coordinator: Conducts this node's own captures; one of a run excludes the other.
    """

    def __init__(
        self,
        ranks_of: Callable[[str], list[Participant]],
        coordinator: Coordinator,
        catalog: Catalog,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._ranks_of = ranks_of
        self._coordinator = coordinator
        self._catalog = catalog
        self._wall = wall
        self._claim = contextlib.ExitStack()
        self._record: CaptureRecord | None = None
        self._folder = Path()
        self._pending = PendingAttempts()
        self._attempts: dict[int, RankAttempt] = {}
        self._reporters: dict[int, asyncio.Task[None]] = {}
        # Where nodes share a captures directory, the conductor's manifest is there and is enough.
        self._is_shared = False
        self.outgoing: asyncio.Queue[fleet_pb2.TakeReport | None] = asyncio.Queue()
        """Reports to the conductor; None is the end."""

    def receive(self, order: fleet_pb2.TakeOrder) -> None:
        """Handle an order of the conductor; one unknown to this version is ignored.

        Raises:
            TorchperfdError: The order is invalid.
        """
        body = order.WhichOneof("body")
        if body == "prepare":
            self._prepare(order.prepare)
        elif body == "commit":
            self._commit(order.commit)
        elif body == "cancel":
            self._cancel(order.cancel)
        elif body == "ping":
            self._pong(order.ping)

    async def end(self) -> None:
        """Cancel what is unfinished, and write the outcome of this node's ranks."""
        try:
            if self._record is not None:
                await self._end(self._record)
        finally:
            self.outgoing.put_nowait(None)

    async def _end(self, record: CaptureRecord) -> None:
        try:
            await self._give_up(record)
        finally:
            for task in self._reporters.values():
                task.cancel()
            for attempt in self._attempts.values():
                attempt.settle(failure(_GONE))
                attempt.read_result(record.step_range or (0, 0))
            self._pending.end(record.capture_id, self._attempts.values())
            self._catalog.enforce_cap(record)
            record.state = overall_state(record.ranks)
            record.reason = first_reason(record.ranks)
            record.ended_at = self._wall()
            self._save(record)
            self._coordinator.counts.count(record, record.ended_at)
            self._claim.close()

    def _prepare(self, order: fleet_pb2.TakePrepare) -> None:
        capture_id, rank = order.prepare.capture_id, order.rank
        options = translate.capture_options_from_message(order.prepare.options)
        if not 1 <= options.steps <= MAX_STEPS:
            raise UsageError(f"steps must be 1 to {MAX_STEPS}")
        if self._record is None:
            try:
                self._begin(order)
            except UsageError:
                raise
            except TorchperfdError as error:
                self._refuse(capture_id, rank, str(error))
                return
        record = self._record
        assert record is not None
        if (capture_id, order.run) != (record.capture_id, record.run):
            raise UsageError("there is one capture of one run to a stream")
        participant = next((each for each in self._ranks_of(record.run) if each.rank == rank), None)
        if participant is None:
            self._refuse(capture_id, rank, "it is not on this node any more")
            return
        trace = next((each for each in record.ranks if each.rank == rank), None)
        if trace is None:
            trace = RankTrace.of(rank, participant.facts)
            record.ranks.append(trace)
            record.ranks.sort(key=lambda each: each.rank)
        (attempt,) = self._pending.begin(capture_id, [participant], [trace])
        self._attempts[rank] = attempt
        earlier = self._reporters.pop(rank, None)
        if earlier is not None:
            earlier.cancel()
        self._reporters[rank] = asyncio.create_task(self._report(record, attempt))
        ranks_here = max(1, len(self._ranks_of(record.run)))
        share = self._catalog.quota.capture_bytes // ranks_here
        caps = [cap for cap in (order.prepare.max_bytes, share) if cap]
        participant.prepare(capture_id, options, self._folder, min(caps, default=0))

    def _begin(self, order: fleet_pb2.TakePrepare) -> None:
        """Claim the run and make the folder.

        Raises:
            UsageError: The id could not be one, or is another capture's.
            TorchperfdError: A capture of the run is in progress here, or nothing can be written.
        """
        capture_id = order.prepare.capture_id
        try:
            self._folder = self._catalog.folder(capture_id)
        except TorchperfdError as error:
            raise UsageError(error.problem) from error
        found = self._catalog.found(capture_id)
        if found is not None and (found.record is None or found.closed or found.record.run != order.run):
            raise UsageError(f"there is a capture {capture_id} already")
        with contextlib.ExitStack() as claim:
            self._pending = claim.enter_context(self._coordinator.reserve_run(order.run))
            if found is None:
                self._catalog.create(capture_id)
            self._claim = claim.pop_all()
        self._is_shared = found is not None
        facts = next((each.facts for each in self._ranks_of(order.run)), None)
        self._record = CaptureRecord(
            capture_id=capture_id,
            run=order.run,
            trigger=TRIGGER,
            requested_at=self._wall(),
            options=translate.capture_options_from_message(order.prepare.options),
            job_name=facts.job_name if facts else "",
            world_size=facts.world_size if facts else 0,
            daemon_version=__version__,
        )

    def _commit(self, order: fleet_pb2.TakeCommit) -> None:
        attempt, record = self._attempts.get(order.rank), self._record
        if attempt is None or record is None:
            return
        steps = order.commit.steps or record.options.steps
        if not (1 <= steps <= MAX_STEPS and order.commit.start_step <= _LAST_STEP):
            raise UsageError(f"steps must be 1 to {MAX_STEPS}")
        start = order.commit.start_step
        attempt.trace.state = record.state = CaptureState.ARMED
        if record.step_range != (start, start + steps):
            record.step_range = (start, start + steps)
            self._save(record)
        attempt.participant.commit(record.capture_id, start, steps)

    def _cancel(self, order: fleet_pb2.TakeCancel) -> None:
        attempt, record = self._attempts.get(order.rank), self._record
        if attempt is None or record is None or attempt.result.done():
            return
        reason = fleet_translate.clean_line(order.cancel.reason)
        attempt.participant.cancel(record.capture_id, reason)
        if attempt.trace.state is CaptureState.PREPARING:
            attempt.settle(failure(reason))

    def _pong(self, ping: fleet_pb2.TakePing) -> None:
        now = time.time_ns()
        if self.outgoing.qsize() >= _OUTGOING:
            return
        ranks = self._ranks_of(self._record.run) if self._record is not None else []
        self._put(
            fleet_pb2.TakeReport(
                pong=fleet_pb2.TakePong(
                    sent_ns=ping.sent_ns,
                    received_ns=now,
                    answered_ns=time.time_ns(),
                    steps={each.rank: each.steps_seen for each in ranks},
                )
            )
        )

    async def _report(self, record: CaptureRecord, attempt: RankAttempt) -> None:
        """Forward a rank's answer, and its outcome."""
        rank = attempt.trace.rank
        # Shielded: cancelling this task must not cancel the rank's answer.
        ack = await asyncio.shield(attempt.ack)
        self._put(fleet_translate.ack_to_report(record.capture_id, rank, ack))
        if not attempt.read_ack():
            return
        result = await asyncio.shield(attempt.result)
        attempt.read_result(record.step_range or (0, 0))
        self._put(fleet_translate.result_to_report(record.capture_id, rank, result))

    async def _give_up(self, record: CaptureRecord) -> None:
        """Cancel the ranks that have not ended; one that is writing its trace may still report its result."""
        waiting: list[asyncio.Future[object]] = []
        for attempt in self._attempts.values():
            if attempt.result.done() or (attempt.ack.done() and not attempt.ack.result().ready):
                continue
            attempt.participant.cancel(record.capture_id, _GONE)
            if attempt.trace.state is CaptureState.ARMED:
                waiting.append(attempt.result)  # type: ignore[arg-type] # a future of anything
        if waiting:
            await asyncio.wait(waiting, timeout=_GRACE_S)

    def _refuse(self, capture_id: str, rank: int, reason: str) -> None:
        self._put(fleet_translate.ack_to_report(capture_id, rank, Ack(False, reason, 0, 0.0)))

    def _put(self, report: fleet_pb2.TakeReport) -> None:
        if self.outgoing.qsize() < _OUTGOING:
            self.outgoing.put_nowait(report)
        else:
            log.warning("the daemon that conducts a capture is not reading its message queue; report dropped")

    def _save(self, record: CaptureRecord) -> None:
        if self._is_shared:
            return
        try:
            self._catalog.save(record)
        except TorchperfdError as error:
            log.warning("capture %s: %s", record.capture_id, error)


_MAX_STACKS_S: Final = 600.0
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
        seconds = asked if 0 < asked <= _MAX_STACKS_S else _MAX_STACKS_S
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
