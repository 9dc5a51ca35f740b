"""Gathers the stacks of ranks: over the session, else by py-spy from outside, else by a signal if allowed.

A rank that answers but makes no progress is also asked for its collectives. That is a second request because
torch's flight recorder may take some milliseconds, or block; the stacks have arrived by then.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Final, Protocol, TypeVar
from weakref import WeakKeyDictionary

from torchperfd.model.messages import Name, StepIndex
from torchperfd.model.process import GroupProgress
from torchperfd_daemon.collectors.process import RankProcess
from torchperfd_daemon.errors import NoSuchTargetError
from torchperfd_daemon.goodput.tracker import process_of
from torchperfd_daemon.service.permissions import Rights
from torchperfd_daemon.service.rank_process import (
    LISTED,
    GoneError,
    StoppedError,
    UnreachableError,
    check_real,
    check_running,
    chosen_ranks,
    describe_wait,
    no_run,
)
from torchperfd_daemon.service.stuck_rank_stacks import read_stacks_by_py_spy, request_stacks_by_signal
from torchperfd_daemon.stacks.model import Outcome, RankStacks, Thread, numbered
from torchperfd_daemon.store.model import State
from torchperfd_daemon.store.store import Rank, Store

T = TypeVar("T")

# An answer takes milliseconds; a rank that takes longer cannot run Python, or gets almost no CPU time.
_PATIENCE_S: Final = 1.0
_PY_SPY_AT_ONCE: Final = 4
_NO_ANSWER: Final = "no Python thread of it answers"
_HELD: Final = f"{_NO_ANSWER}, as when native code holds the interpreter"
_CUT_OFF: Final = "it has lost its connection to the daemon"
_OLDER: Final = "its torchperfd is too old to report stacks; install the same version on both sides"
_SIGNAL_SENT: Final = "a signal was sent, which can crash a rank"
_ASK_FOR_SIGNAL: Final = "`torchperfd stacks --signal` may read it, at the risk that its --help states"


class Asked(Protocol):
    """A connected rank that can be asked for its stacks."""

    @property
    def reports_stacks(self) -> bool:
        """Whether its client can report its stacks."""

    @property
    def reports_collectives(self) -> bool:
        """Whether its client can report the progress of its process groups."""

    def dump_stacks(self, request_id: int, *, loading_only: bool = False, threads_only: bool = False) -> None:
        """Ask it for its stacks; see ``DumpStacks``."""

    def tell_collectives(self, request_id: int) -> None:
        """Ask it for the progress of its process groups."""


@dataclass(frozen=True, slots=True)
class Report:
    """A rank's own answer: its threads, tidied, and where in which step the training thread is."""

    threads: tuple[Annotated[Thread, numbered], ...]
    phase: Name
    step: StepIndex


ReadStacks = Callable[[RankProcess, float], Awaitable[tuple[Thread, ...]]]
"""Returns a process's stacks within so many seconds; raises UnreachableError."""


class StackRequests:
    """Gathers the stacks of ranks."""

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        read: ReadStacks = read_stacks_by_py_spy,
        signal: ReadStacks = request_stacks_by_signal,
    ) -> None:
        self._wall = wall
        self._read = read
        self._signal = signal
        self._ids = itertools.count(1)
        self._waiting: dict[tuple[int, Asked], asyncio.Future[Report]] = {}
        self._counting: dict[tuple[int, Asked], asyncio.Future[tuple[GroupProgress, ...]]] = {}
        self._reading = asyncio.Semaphore(_PY_SPY_AT_ONCE)
        # Two at once would cut off each other's file.
        self._signalling: WeakKeyDictionary[Rank, asyncio.Lock] = WeakKeyDictionary()

    async def stacks(
        self, targets: Sequence[tuple[Rank, Asked | None]], seconds: float, *, allow_signal: bool = False
    ) -> AsyncIterator[RankStacks]:
        """Yield each rank's stacks as soon as they arrive.

        Args:
            targets: Ranks, with their sessions where they are connected.
            allow_signal: Whether to send a signal to a rank that can be read in no other way. The signal can
                crash the rank, so only an explicit request of a user sets this.
        """
        deadline = asyncio.get_running_loop().time() + seconds
        tasks = [
            asyncio.create_task(self._of(rank, asked, deadline, allow_signal)) for rank, asked in targets
        ]
        try:
            for task in asyncio.as_completed(tasks):
                yield await task
        finally:
            for task in tasks:
                task.cancel()

    async def sample(
        self, asked: Asked, seconds: float, *, threads_only: bool = False
    ) -> tuple[Thread, ...] | None:
        """Return a rank's training thread and its DataLoader workers, or its threads at a random moment.

        None if it does not answer itself.
        """
        if not asked.reports_stacks:
            return None
        deadline = asyncio.get_running_loop().time() + seconds
        dump = partial(asked.dump_stacks, loading_only=not threads_only, threads_only=threads_only)
        report = await self._answer(self._waiting, asked, dump, deadline)
        return report.threads if report else None

    def on_report(self, asked: Asked, request_id: int, report: Report) -> None:
        """Store a rank's answer."""
        _settle(self._waiting.get((request_id, asked)), report)

    def on_collectives(self, asked: Asked, request_id: int, groups: tuple[GroupProgress, ...]) -> None:
        """Store the progress of a rank's process groups."""
        _settle(self._counting.get((request_id, asked)), groups)

    async def _of(self, rank: Rank, asked: Asked | None, deadline: float, allow_signal: bool) -> RankStacks:
        process = process_of(rank)
        try:
            await asyncio.to_thread(check_running, process)
            own = await self._own_answer(rank, asked, deadline)
            return own or await self._from_outside(rank, asked, process, deadline, allow_signal)
        except GoneError as error:
            reason = "it has finished" if rank.state is State.FINISHED else str(error)
            return self._result(rank, Outcome.GONE, reason)
        except StoppedError as error:
            return self._result(rank, Outcome.STOPPED, str(error))

    async def _own_answer(self, rank: Rank, asked: Asked | None, deadline: float) -> RankStacks | None:
        if asked is None or not asked.reports_stacks:
            return None
        report = await self._answer(self._waiting, asked, asked.dump_stacks, deadline)
        if report is None:
            return None
        own = self._result(rank, Outcome.ANSWERED, "", report.threads, report.phase, report.step)
        if own.goes_on or not asked.reports_collectives:
            return own
        groups = await self._answer(self._counting, asked, asked.tell_collectives, deadline)
        return replace(own, collectives=groups or ())

    async def _from_outside(
        self, rank: Rank, asked: Asked | None, process: RankProcess, deadline: float, allow_signal: bool
    ) -> RankStacks:
        """Return what can be read of a rank that does not answer."""
        held = _CUT_OFF if asked is None else _HELD if asked.reports_stacks else _OLDER
        reasons = [_NO_ANSWER if held is _HELD else held]
        try:
            async with self._reading:
                threads = await self._read(process, _left(deadline))
            return self._result(rank, Outcome.READ, held, threads)
        except (GoneError, StoppedError):
            raise
        except UnreachableError as error:
            reasons.append(str(error))
        if not allow_signal:
            reasons.append(_ASK_FOR_SIGNAL)
        else:
            try:
                async with self._signalling.setdefault(rank, asyncio.Lock()):
                    threads = await self._signal(process, _left(deadline))
                return self._result(rank, Outcome.SIGNALLED, f"{held}; {_SIGNAL_SENT}", threads)
            except (GoneError, StoppedError):
                raise
            except UnreachableError as error:
                reasons.append(str(error))
        reasons.append(await asyncio.to_thread(describe_wait, process))
        return self._result(rank, Outcome.NO_ANSWER, "; ".join(filter(None, reasons)))

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
            return await asyncio.wait_for(future, min(_PATIENCE_S, _left(deadline)))
        except TimeoutError:
            return None
        finally:
            del waiting[request_id, asked]

    def _result(
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
    """Return the ranks of a run on this node, including those that left a moment ago.

    Args:
        run: Its name; empty for the only one that has connected ranks, or the only one at all.
        wanted: Which ranks; all when empty.

    Raises:
        NotAllowedError: The run is of another user.
        NoSuchTargetError: There is no such run or rank, or more than one run to choose from.
    """
    runs = store.runs()
    if not run:
        own = {name: ranks for name, ranks in runs.items() if rights.may_command(ranks[0].process.uid)}
        alive = [name for name, ranks in own.items() if any(rank.connected for rank in ranks)] or list(own)
        if not alive:
            raise no_run(bool(runs))
        if len(alive) > 1:
            raise NoSuchTargetError(
                f"this node has {len(alive)} runs: {', '.join(alive)}", "choose one with --run"
            )
        (run,) = alive
    run = rights.own_name(run, runs)
    ranks = runs.get(run)
    if not ranks:
        raise NoSuchTargetError(f"no run {run} on this node", LISTED)
    rights.check(f"run {run}", (rank.process.uid for rank in ranks))
    check_real(ranks)
    return chosen_ranks(run, ranks, lambda rank: rank.identity.rank, wanted)


def _left(deadline: float) -> float:
    return deadline - asyncio.get_running_loop().time()


def _settle(future: asyncio.Future[T] | None, answer: T) -> None:
    if future is not None and not future.done():
        future.set_result(answer)
