"""Targets of a request: connected ranks of this node, ranks of other nodes, and ranks that were not found."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, TypeVar

from torchperfd.v1 import control_pb2, fleet_pb2
from torchperfd_daemon.captures.coordinator import Coordinator
from torchperfd_daemon.captures.manifest import CaptureOptions, RankFacts
from torchperfd_daemon.captures.rank_attempts import Ack, Participant
from torchperfd_daemon.errors import NoSuchTargetError
from torchperfd_daemon.service.permissions import Rights
from torchperfd_daemon.service.rank_process import LISTED, check_real, chosen_ranks, no_run
from torchperfd_daemon.service.rank_session import Session
from torchperfd_daemon.store.store import Store

T = TypeVar("T")

_MAX_RANKS: Final = 100_000
_MAX_NAMED_RANKS: Final = 20


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
    """Queries the other nodes, as ``fleet.FleetView`` does, and merges their answers with this node's.

    ``may`` is the caller's right: nodes that only ranks of other users name are not asked. Each query raises
    UsageError if no peers are configured, TorchperfdError if they cannot be resolved, NoSuchTargetError if no
    node has such a run, job or rank, or there are several runs to choose from.
    """

    @property
    def known(self) -> bool:
        """Whether peers are configured; a job is then looked for on all of them."""

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
            redact: Removes from a verdict what the caller may not see.
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
        """Keep streams to the ranks of a run on all nodes open, for one capture.

        Args:
            run: Its name; empty if there is only one run.
            ranks: The ranks to select; all if empty.
            own: Returns the connected ranks of the job on this node, by run.
        """


OfRun = Callable[[str], list[Session]]


class Targets:
    """Finds connected ranks.

    Args:
        of_run: Returns the connected ranks of a run, by rank.
        rights: Of the caller; runs that it may not command are found by their name only, and refused.
    """

    def __init__(self, store: Store, of_run: OfRun, rights: Rights) -> None:
        self._store = store
        self._of_run = of_run
        self._rights = rights

    def runs(self, job: str = "") -> list[str]:
        """Return the caller's runs, of all jobs or of one, that have a connected rank."""
        return [
            run
            for run, ranks in self._store.runs().items()
            if job in ("", ranks[0].identity.job_name)
            and self._rights.may_command(ranks[0].process.uid)
            and self._of_run(run)
        ]

    def run(self, name: str, job: str = "") -> str:
        """Return the run of a name, or the only one there is, of all jobs or of one, when it is empty."""
        if name:
            name = self._rights.own_name(name, self._store.runs())
            if job and name not in self.runs(job):
                raise NoSuchTargetError(
                    f"this node has no run {name[:80]} of job {job[:80]}",
                    LISTED,
                )
            return name
        runs = self.runs(job)
        if not runs:
            check_real(rank for rank in self._store.ranks() if job in ("", rank.identity.job_name))
        if len(runs) == 1:
            return runs[0]
        of_job = f" of job {job[:80]}" if job else ""
        if runs:
            raise NoSuchTargetError(
                f"this node has {len(runs)} runs{of_job}: {', '.join(runs)}", "choose one with --run"
            )
        of_others = (
            job in ("", ranks[0].identity.job_name) and not self._rights.may_command(ranks[0].process.uid)
            for ranks in self._store.runs().values()
        )
        raise no_run(any(of_others), of_job)

    def ranks(self, run: str, chosen: Iterable[int]) -> list[Session]:
        """Return the chosen ranks of a run, all of them when none is chosen.

        Raises:
            NoSuchTargetError: There is no such run, or it lacks one of the ranks.
        """
        sessions = self._of_run(run)
        if not sessions:
            check_real(self._store.runs().get(run, ()))
            raise NoSuchTargetError(f"no run {run} on this node", LISTED)
        self._rights.check(f"run {run}", (session.record.process.uid for session in sessions))
        return chosen_ranks(run, sessions, lambda session: session.rank, chosen)


class MissingRank:
    """A rank of the run that was not found: it fails by name instead of being left out."""

    def __init__(self, rank: int, facts: RankFacts, reason: str, coordinator: Coordinator) -> None:
        self.rank = rank
        self.steps_seen = 0
        self.facts = facts
        self._reason = reason
        self._coordinator = coordinator

    def prepare(self, capture_id: str, options: CaptureOptions, directory: Path, max_bytes: int) -> None:
        """Fail with the reason."""
        answer_later(self._coordinator, capture_id, self.rank, self._reason)

    def commit(self, capture_id: str, start_step: int, steps: int) -> None:
        """Do nothing: the rank is never ready."""

    def cancel(self, capture_id: str, reason: str) -> None:
        """Do nothing: the rank was never ready."""


def whole_job(
    run: str, wanted: Collection[int], found: Mapping[int, Participant], reason: str, coordinator: Coordinator
) -> list[Participant]:
    """Return a participant for each rank, in order; those that were not found fail by name.

    Args:
        wanted: Which ranks; all ranks of the job when empty.
        found: The ranks that can take part; at least one.

    Raises:
        NoSuchTargetError: The job is too small to have one of the ranks.
    """
    facts = next(iter(found.values())).facts
    world = min(max(each.facts.world_size for each in found.values()), _MAX_RANKS)
    ranks = sorted(set(wanted)) or sorted(found.keys() | set(range(world)))
    if beyond := [rank for rank in ranks if rank not in found and rank >= world]:
        raise NoSuchTargetError(
            f"run {run} has no rank {', '.join(map(str, beyond[:_MAX_NAMED_RANKS]))}", f"it has {world} ranks"
        )
    missing = RankFacts(job_name=facts.job_name, world_size=facts.world_size)
    return [found.get(rank) or MissingRank(rank, missing, reason, coordinator) for rank in ranks]


def answer_later(coordinator: Coordinator, capture_id: str, rank: int, reason: str) -> None:
    """Answer prepare, after the caller has begun to wait for the answer."""
    loop = asyncio.get_running_loop()
    loop.call_soon(coordinator.on_ack, capture_id, rank, Ack(False, reason, 0, 0.0))


async def merged(streams: Sequence[AsyncIterator[T]]) -> AsyncIterator[T]:
    """Yield the streams' items as they arrive, until all streams have ended.

    Raises:
        Exception: Raised by a stream; the others are cancelled.
    """
    items: asyncio.Queue[T | None] = asyncio.Queue()

    async def forward(stream: AsyncIterator[T]) -> None:
        try:
            async for item in stream:
                items.put_nowait(item)
        finally:
            items.put_nowait(None)

    tasks = [asyncio.create_task(forward(stream)) for stream in streams]
    try:
        running = len(tasks)
        while running:
            item = await items.get()
            if item is None:
                running -= 1
            else:
                yield item
        for task in tasks:
            await task
    finally:
        for task in tasks:
            task.cancel()
        # Their streams have to be given up before ours is.
        await asyncio.gather(*tasks, return_exceptions=True)
