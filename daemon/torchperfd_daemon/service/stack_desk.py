"""The stack desk: asks ranks where their threads are, first over the session, then by a signal.

Who answers and stands still is asked how far its collectives are, too: torch's record may keep a rank busy
for some milliseconds, and where the record itself is stuck the stacks have been told already.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol, TypeVar
from weakref import WeakKeyDictionary

from torchperfd_daemon.collectors.ranks import RankProcess
from torchperfd_daemon.errors import NoSuchTargetError
from torchperfd_daemon.service.permissions import Rights
from torchperfd_daemon.service.process import check_real, process_of
from torchperfd_daemon.service.stack_signal import (
    GoneError,
    StoppedError,
    UnreachableError,
    look,
    stacks_by_signal,
    waits_in,
)
from torchperfd_daemon.stacks import GroupProgress, Outcome, RankStacks, Thread
from torchperfd_daemon.store import Rank, State, Store

T = TypeVar("T")

# An answer takes milliseconds; a rank that takes longer cannot run Python, or hardly gets to run at all.
_PATIENCE_S: Final = 1.0
_HELD: Final = "no Python thread of it answers, as when native code holds the interpreter"
_CUT_OFF: Final = "it has lost its connection to the daemon"


class Asked(Protocol):
    """A connected rank, as far as stacks are concerned."""

    @property
    def tells_stacks(self) -> bool:
        """Whether its client knows the question."""

    @property
    def tells_collectives(self) -> bool:
        """Whether its client knows the other question."""

    def dump_stacks(self, request_id: int) -> None:
        """Ask it where its threads are."""

    def tell_collectives(self, request_id: int) -> None:
        """Ask it how far its process groups are."""


@dataclass(frozen=True, slots=True)
class Report:
    """A rank's own answer: its threads, tidied, and where in which step the training thread is."""

    threads: tuple[Thread, ...]
    phase: str
    step: int


class StackDesk:
    """Gathers the stacks of ranks.

    Args:
        wall: Unix seconds.
    """

    def __init__(self, wall: Callable[[], float] = time.time) -> None:
        self._wall = wall
        self._ids = itertools.count(1)
        self._waiting: dict[tuple[int, Asked], asyncio.Future[Report]] = {}
        self._counting: dict[tuple[int, Asked], asyncio.Future[tuple[GroupProgress, ...]]] = {}
        # Two at once would cut off each other's file.
        self._signalling: WeakKeyDictionary[Rank, asyncio.Lock] = WeakKeyDictionary()

    async def stacks(
        self, targets: Sequence[tuple[Rank, Asked | None]], seconds: float
    ) -> AsyncIterator[RankStacks]:
        """Yield where each rank's threads are, as soon as it is known.

        Args:
            targets: Ranks, with their sessions where they are connected.
            seconds: How long to wait for any of them.
        """
        deadline = asyncio.get_running_loop().time() + seconds
        tasks = [asyncio.create_task(self._of(rank, asked, deadline)) for rank, asked in targets]
        try:
            for task in asyncio.as_completed(tasks):
                yield await task
        finally:
            for task in tasks:
                task.cancel()

    def on_report(self, asked: Asked, request_id: int, report: Report) -> None:
        """A rank has answered."""
        _settle(self._waiting.get((request_id, asked)), report)

    def on_collectives(self, asked: Asked, request_id: int, groups: tuple[GroupProgress, ...]) -> None:
        """A rank has said how far its process groups are."""
        _settle(self._counting.get((request_id, asked)), groups)

    async def _of(self, rank: Rank, asked: Asked | None, deadline: float) -> RankStacks:
        process = process_of(rank)
        try:
            await asyncio.to_thread(look, process)
            if asked is not None and asked.tells_stacks:
                report = await self._answer(self._waiting, asked, asked.dump_stacks, deadline)
                if report is not None:
                    told = self._told(rank, Outcome.ANSWERED, "", report.threads, report.phase, report.step)
                    if told.goes_on or not asked.tells_collectives:
                        return told
                    groups = await self._answer(self._counting, asked, asked.tell_collectives, deadline)
                    return replace(told, collectives=groups or ())
            threads = await self._by_signal(rank, process, deadline)
        except GoneError as error:
            return self._told(
                rank, Outcome.GONE, "it has finished" if rank.state is State.FINISHED else str(error)
            )
        except StoppedError as error:
            return self._told(rank, Outcome.STOPPED, str(error))
        except UnreachableError as error:
            return self._told(rank, Outcome.NO_ANSWER, await self._why(rank, asked, process, str(error)))
        return self._told(rank, Outcome.SIGNALLED, _CUT_OFF if asked is None else _HELD, threads)

    async def _answer(
        self,
        waiting: dict[tuple[int, Asked], asyncio.Future[T]],
        asked: Asked,
        ask: Callable[[int], None],
        deadline: float,
    ) -> T | None:
        loop = asyncio.get_running_loop()
        request_id = next(self._ids)
        future: asyncio.Future[T] = loop.create_future()
        waiting[request_id, asked] = future
        try:
            ask(request_id)
            return await asyncio.wait_for(future, min(_PATIENCE_S, deadline - loop.time()))
        except TimeoutError:
            return None
        finally:
            del waiting[request_id, asked]

    async def _by_signal(self, rank: Rank, process: RankProcess, deadline: float) -> tuple[Thread, ...]:
        async with self._signalling.setdefault(rank, asyncio.Lock()):
            left = deadline - asyncio.get_running_loop().time()
            return await stacks_by_signal(process, left)

    async def _why(self, rank: Rank, asked: Asked | None, process: RankProcess, why_no_signal: str) -> str:
        if asked is None:
            reason = _CUT_OFF
        elif not asked.tells_stacks:
            reason = "its torchperfd is older and cannot tell; install the same version on both sides"
        else:
            reason = "no Python thread of it answers"
        state = await asyncio.to_thread(waits_in, process)
        return "; ".join(filter(None, (reason, why_no_signal, state)))

    def _told(
        self,
        rank: Rank,
        outcome: Outcome,
        reason: str,
        threads: tuple[Thread, ...] = (),
        phase: str = "",
        step: int | None = None,
    ) -> RankStacks:
        last = rank.last_step_unix_seconds
        return RankStacks(
            rank=rank.identity.rank,
            world_size=rank.identity.world_size,
            node=rank.identity.node,
            pid=rank.identity.pid,
            outcome=outcome,
            reason=reason,
            threads=threads,
            phase=phase,
            step=step,
            step_seconds=rank.mean_step_seconds(),
            seconds_since_step=max(0.0, self._wall() - last) if last else None,
        )


def choose(store: Store, run: str, wanted: Collection[int], rights: Rights) -> list[Rank]:
    """Return the ranks of a run on this node, also those that left a moment ago.

    Args:
        store: Knows the ranks.
        run: Its name; empty for the only one that has connected ranks, or the only one at all.
        wanted: Which ranks; all when empty.
        rights: Of the caller.

    Raises:
        NotAllowedError: The run is of another user.
        NoSuchTargetError: There is no such run or rank, or more than one run to choose from.
    """
    runs = store.runs()
    if not run:
        own = {name: ranks for name, ranks in runs.items() if rights.may_command(ranks[0].process.uid)}
        alive = [name for name, ranks in own.items() if any(rank.connected for rank in ranks)] or list(own)
        if len(alive) != 1:
            found = f"{len(alive)} runs: {', '.join(alive)}" if alive else "no run"
            hint = "choose one with --run" if alive else "start one with `torchperfd run`"
            raise NoSuchTargetError(f"this node has {found}", hint)
        (run,) = alive
    run = rights.own_name(run, runs)
    ranks = runs.get(run)
    if not ranks:
        raise NoSuchTargetError(f"no run {run} on this node", "`torchperfd ps` lists those there are")
    rights.check(f"run {run}", (rank.process.uid for rank in ranks))
    check_real(ranks)
    there = {rank.identity.rank for rank in ranks}
    missing = sorted(set(wanted) - there)
    if missing:
        raise NoSuchTargetError(
            f"run {run} has no rank {', '.join(map(str, missing[:20]))} on this node",
            f"it has {', '.join(map(str, sorted(there)))}",
        )
    return [rank for rank in ranks if not wanted or rank.identity.rank in wanted]


def _settle(future: asyncio.Future[T] | None, answer: T) -> None:
    if future is not None and not future.done():
        future.set_result(answer)
