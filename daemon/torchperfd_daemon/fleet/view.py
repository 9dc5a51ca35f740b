"""Answers the commands with ``--fleet``: collects the answers of all daemons and merges them."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

from torchperfd._version import __revision__, __version__
from torchperfd.v1 import control_pb2, fleet_pb2, fleet_pb2_grpc
from torchperfd_daemon.captures.coordinator import Coordinator
from torchperfd_daemon.captures.rank_attempts import Participant
from torchperfd_daemon.errors import NoSuchTargetError, UsageError
from torchperfd_daemon.fleet import translate as fleet_translate
from torchperfd_daemon.fleet.addresses import Address
from torchperfd_daemon.fleet.peers import PeerAddresses
from torchperfd_daemon.fleet.relay import Relay, RemoteRank, keep_pinging
from torchperfd_daemon.fleet.translate import each_once, shown_verdicts
from torchperfd_daemon.fleet.transport import Answers, FanOut, Unreachable, unreachable_text
from torchperfd_daemon.service.targets import MayCommand, RankSelection, Redact, whole_job

log = logging.getLogger("torchperfd.fleet")

_ASK_S: Final = 1.0
"""The time limit of a peer for an answer that takes no work."""
_SLACK_S: Final = 2.0
_MAX_NAMED: Final = 20

_ALL: Final = range(2**32)

INSTANCE_KEY: Final = "torchperfd-instance"
"""The metadata at the start of a stream of stacks that identifies its daemon."""


class _HasInstance(Protocol):
    @property
    def instance(self) -> str: ...


_Answer = TypeVar("_Answer", bound=_HasInstance)


@dataclass(frozen=True, slots=True)
class _NodeStacks:
    instance: str
    ranks: list[control_pb2.RankStacks]


@dataclass(frozen=True, slots=True)
class _Surveyed:
    """The surveys of all nodes that answer, this node's first."""

    surveys: list[fleet_pb2.NodeSurvey]
    nodes: list[control_pb2.FleetNode]
    unreachable: list[control_pb2.UnreachablePeer]


class FleetView:
    """A ``PeerDirectory``: queries the other daemons of the fleet, and merges their answers with this node's.

    Args:
        peers: The addresses of the fleet's daemons; None if no peers are configured.
        instance: The id of this daemon's process, since the peers' addresses may include this daemon.
    """

    def __init__(
        self, peers: PeerAddresses | None, fan_out: FanOut, coordinator: Coordinator, instance: str, node: str
    ) -> None:
        self._peers = peers
        self._fan_out = fan_out
        self._coordinator = coordinator
        self._instance = instance
        self._node = node

    @property
    def known(self) -> bool:
        return self._peers is not None

    async def runs(
        self, own: Sequence[control_pb2.Run], may: MayCommand, job: str = ""
    ) -> control_pb2.ListRunsResponse:
        answers = await self._list_runs(may)
        nodes = [_node("", self._node, __version__, __revision__, _ranks_of(own))]
        found = [*own]
        for address, answer in answers.by_peer.items():
            runs = [run for run in map(fleet_translate.tidy_run, answer.runs) if job in ("", run.job_name)]
            nodes.append(_node(str(address), answer.node, answer.version, answer.revision, _ranks_of(runs)))
            found.extend(runs)
        if job and not found:
            raise _no_run("", answers.unreachable, job)
        return control_pb2.ListRunsResponse(
            runs=merge(found),
            nodes=nodes,
            unreachable=map(fleet_translate.unreachable_to_message, answers.unreachable),
        )

    async def choose(self, run: str, own: Sequence[str], may: MayCommand) -> str:
        if run:
            return run
        answers = await self._list_runs(may)
        there = [
            each.run
            for answer in answers.by_peer.values()
            for each in answer.runs
            if any(may(fleet_translate.uid_of(rank)) for rank in each.ranks)
        ]
        return _only({*own, *there}, answers.unreachable)

    async def steps(
        self, asked: fleet_pb2.NodeSurveyRequest, own: fleet_pb2.NodeSurvey, may: MayCommand
    ) -> control_pb2.GetStepsResponse:
        joined = await self._survey(asked, own, may)
        by_rank = sorted(each_once(joined.surveys).items())
        return control_pb2.GetStepsResponse(
            ranks=[steps for _, (steps, _) in by_rank], nodes=joined.nodes, unreachable=joined.unreachable
        )

    async def diagnose(
        self,
        asked: fleet_pb2.NodeSurveyRequest,
        own: fleet_pb2.NodeSurvey,
        redact: Redact,
        may: MayCommand,
        seconds: float | None = None,
    ) -> control_pb2.DiagnoseResponse:
        joined = await self._survey(asked, own, may, _ASK_S if seconds is None else seconds)
        # Thousands of ranks take a moment, and this loop has clients to answer.
        verdicts = await asyncio.to_thread(
            lambda: [*shown_verdicts(joined.surveys, redact, at_end=asked.at_end)]
        )
        return control_pb2.DiagnoseResponse(
            verdicts=verdicts, nodes=joined.nodes, unreachable=joined.unreachable
        )

    async def stacks(
        self, request: control_pb2.StacksRequest, may: MayCommand
    ) -> AsyncIterator[control_pb2.RankStacks]:
        async def ask(_: Address, stub: "fleet_pb2_grpc.FleetAsyncStub") -> _NodeStacks:
            call = stub.Stacks(request, metadata=self._fan_out.metadata)
            instance = dict(await call.initial_metadata()).get(INSTANCE_KEY, "")
            return _NodeStacks(str(instance), [stacks async for stacks in call])

        answers = await self._ask(ask, request.timeout_seconds + _SLACK_S, may)
        for answer in answers.by_peer.values():
            for stacks in answer.ranks:
                if stacks.identity.run == request.run and may(fleet_translate.uid_of(stacks)):
                    yield stacks
        for peer in answers.unreachable:
            yield control_pb2.RankStacks(unreachable=fleet_translate.unreachable_to_message(peer))

    @contextlib.asynccontextmanager
    async def gather(
        self,
        run: str,
        ranks: Sequence[int],
        own: Callable[[], dict[str, list[Participant]]],
        may: MayCommand,
        job: str = "",
    ) -> AsyncIterator[RankSelection]:
        answers = await self._fan_out.ask(await self._addresses(may), self._begin, _ASK_S)
        pinging = None
        try:
            with self._fan_out.holding(answers.by_peer):
                distinct = self._distinct(answers)
                here, carrying = own(), []
                run = run or _only(
                    {
                        *here,
                        *(name for relay in distinct.values() for name in _connected(relay.here, job, may)),
                    },
                    answers.unreachable,
                    job,
                )
                found = {rank.rank: rank for rank in here.get(run, [])}
                for relay in distinct.values():
                    wanted = [
                        status
                        for status in _connected(relay.here, job, may).get(run, [])
                        if status.identity.rank not in found and status.identity.rank in (ranks or _ALL)
                    ]
                    if wanted:
                        found.update((rank.rank, rank) for rank in relay.carry(run, wanted))
                        carrying.append(relay)
                if not found:
                    raise _no_run(run, answers.unreachable, job)
                if carrying:
                    pinging = asyncio.create_task(keep_pinging(carrying))
                yield RankSelection(
                    run,
                    self._chosen(run, ranks, found, answers.unreachable),
                    {rank: each.facts.node for rank, each in found.items() if isinstance(each, RemoteRank)},
                    list(map(fleet_translate.unreachable_to_message, answers.unreachable)),
                )
        finally:
            await asyncio.gather(*(relay.close() for relay in answers.by_peer.values()))
            if pinging is not None:
                pinging.cancel()

    def _chosen(
        self,
        run: str,
        ranks: Sequence[int],
        found: dict[int, Participant],
        unreachable: Sequence[Unreachable],
    ) -> list[Participant]:
        """Return a participant for each wanted rank, also for ranks that no node has."""
        reason = "it is on no node that answers" + (
            f"; no answer from {unreachable_text(unreachable[:_MAX_NAMED])}" if unreachable else ""
        )
        return whole_job(run, ranks, found, reason, self._coordinator)

    async def _list_runs(self, may: MayCommand) -> Answers[fleet_pb2.NodeRuns]:
        async def ask(_: Address, stub: "fleet_pb2_grpc.FleetAsyncStub") -> fleet_pb2.NodeRuns:
            request = fleet_pb2.NodeRunsRequest(api=fleet_translate.api_message())
            answer = await stub.ListRuns(request, metadata=self._fan_out.metadata)
            fleet_translate.check_version(answer.api)
            return answer

        return await self._ask(ask, _ASK_S, may)

    async def _survey(
        self,
        asked: fleet_pb2.NodeSurveyRequest,
        own: fleet_pb2.NodeSurvey,
        may: MayCommand,
        seconds: float = _ASK_S,
    ) -> "_Surveyed":
        request = fleet_pb2.NodeSurveyRequest()
        request.CopyFrom(asked)
        request.api.CopyFrom(fleet_translate.api_message())

        async def ask(_: Address, stub: "fleet_pb2_grpc.FleetAsyncStub") -> fleet_pb2.NodeSurvey:
            answer = await stub.Survey(request, metadata=self._fan_out.metadata)
            fleet_translate.check_version(answer.api)
            return fleet_translate.tidy_survey(answer)

        own.node = self._node
        answers = await self._ask(ask, seconds, may)
        surveys = [own, *answers.by_peer.values()]
        if (asked.run or asked.job) and not any(survey.ranks for survey in surveys):
            raise _no_run(asked.run, answers.unreachable, asked.job)
        nodes = [_node("", self._node, __version__, __revision__, (steps.status for steps in own.ranks))]
        nodes += [
            _node(
                str(address),
                answer.node,
                answer.version,
                answer.revision,
                (steps.status for steps in answer.ranks),
            )
            for address, answer in answers.by_peer.items()
        ]
        return _Surveyed(surveys, nodes, [*map(fleet_translate.unreachable_to_message, answers.unreachable)])

    async def _begin(self, address: Address, stub: "fleet_pb2_grpc.FleetAsyncStub") -> Relay:
        call = stub.Take(metadata=self._fan_out.metadata)  # type: ignore[call-arg] # written to, not iterated
        return await Relay(address, call, self._coordinator).begin()

    async def _ask(
        self,
        question: Callable[[Address, "fleet_pb2_grpc.FleetAsyncStub"], Awaitable[_Answer]],
        seconds: float,
        may: MayCommand,
    ) -> Answers[_Answer]:
        answers = await self._fan_out.ask(await self._addresses(may), question, seconds)
        return Answers(self._distinct(answers), answers.unreachable)

    async def _addresses(self, may: MayCommand) -> tuple[Address, ...]:
        if self._peers is None:
            raise UsageError(
                "this daemon knows of no other nodes", "name them with `torchperfd serve --fleet-peers`"
            )
        return await self._peers.addresses(may)

    def _distinct(self, answers: Answers[_Answer]) -> dict[Address, _Answer]:
        """Return the answers of other daemons; a daemon under several addresses counts once."""
        by_instance = {self._instance: Address("", 0)}
        return {
            address: answer
            for address, answer in answers.by_peer.items()
            if by_instance.setdefault(answer.instance, address) == address
        }


def merge(runs: Iterable[control_pb2.Run]) -> list[control_pb2.Run]:
    """Return each run once, with the ranks of all nodes in order."""
    merged: dict[str, control_pb2.Run] = {}
    for run in runs:
        whole = merged.setdefault(run.run, control_pb2.Run(run=run.run, job_name=run.job_name))
        whole.world_size = max(whole.world_size, run.world_size)
        whole.ranks.extend(run.ranks)
    for whole in merged.values():
        whole.ranks.sort(key=lambda rank: (rank.identity.rank, not rank.connected))
    return [merged[name] for name in sorted(merged)]


def _ranks_of(runs: Iterable[control_pb2.Run]) -> Iterator[control_pb2.RankStatus]:
    return (rank for run in runs for rank in run.ranks)


def _node(
    address: str, node: str, version: str, revision: str, ranks: Iterable[control_pb2.RankStatus]
) -> control_pb2.FleetNode:
    return control_pb2.FleetNode(
        address=address,
        node=fleet_translate.clean_line(node),
        version=fleet_translate.clean_line(version),
        revision=fleet_translate.clean_line(revision),
        ranks=sum(rank.connected for rank in ranks),
    )


def _connected(
    node: fleet_pb2.NodeRuns, job: str, may: MayCommand
) -> dict[str, list[control_pb2.RankStatus]]:
    """Return the connected ranks of a node that the caller may capture, of all jobs or of one, by run."""
    runs = {
        run.run: [rank for rank in run.ranks if rank.connected and may(fleet_translate.uid_of(rank))]
        for run in node.runs
        if run.run and job in ("", run.job_name)
    }
    return {run: ranks for run, ranks in runs.items() if ranks}


def _only(runs: Collection[str], unreachable: Sequence[Unreachable], job: str = "") -> str:
    if not runs:
        raise _no_run("", unreachable, job)
    if len(runs) > 1:
        of_job = f" of job {job[:80]}" if job else ""
        raise NoSuchTargetError(
            f"the fleet has {len(runs)} runs{of_job}: {', '.join(sorted(runs)[:_MAX_NAMED])}",
            "choose one with --run",
        )
    return next(iter(runs))


def _no_run(run: str, unreachable: Sequence[Unreachable], job: str = "") -> NoSuchTargetError:
    silent = f", and no answer from {unreachable_text(unreachable[:_MAX_NAMED])}" if unreachable else ""
    name = (f" {run[:80]}" if run else "") + (f" of job {job[:80]}" if job else "")
    return NoSuchTargetError(
        f"no run{name} on any node of the fleet that answers{silent}",
        "`torchperfd ps --fleet` lists those there are",
    )
