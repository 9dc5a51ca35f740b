"""The accountant: keeps the ledgers of the ranks in the store, looking at them once a second."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from torchperfd_daemon.background import WorkerHealth
from torchperfd_daemon.collectors.ranks import RankProcess
from torchperfd_daemon.goodput.clock import Clocks, GoodputClock, boot_id
from torchperfd_daemon.goodput.exits import Exit, exit_of
from torchperfd_daemon.goodput.store import GoodputStore, RankKey, packed
from torchperfd_daemon.goodput.summary import RankGoodput, RunGoodput, by_run
from torchperfd_daemon.goodput.totals import Bucket, Claims, GoodputTotals
from torchperfd_daemon.store import KindTotal, Rank, RankIdentity, State, Store, Totals

log = logging.getLogger("torchperfd.goodput")

_LOOK_S: Final = 1.0
_SAVE_EVERY: Final = 5
_MOST_RUNS: Final = 100
_MOST_NS: Final = 2**62
_PAUSES: Final = (State.VALIDATING, State.CHECKPOINTING)

ExitOf = Callable[[RankProcess, Callable[[], int]], Exit | None]


@dataclass(slots=True)
class _Followed:
    """A process that is looked at.

    Attributes:
        told: The account that was last taken.
    """

    rank: Rank
    exit: Exit | None
    told: Totals


class GoodputTracker:
    """Feeds ledgers from the store. All but :meth:`settled_seconds` is of one loop.

    Args:
        store: Where the ranks are.
        book: Where ledgers are kept.
        clocks: The node's.
        boot: Tells this boot of the node from others.
        exits: Waits for a process to end.
    """

    def __init__(
        self,
        store: Store,
        book: GoodputStore,
        clocks: Clocks | None = None,
        boot: str | None = None,
        exits: ExitOf = exit_of,
    ) -> None:
        self._store = store
        self._book = book
        self._clocks = clocks or Clocks()
        self._boot = boot_id() if boot is None else boot
        self._exits = exits
        self._clock: GoodputClock | None = None
        self._followed: dict[RankKey, _Followed] = {}
        self._ledgers: dict[RankKey, GoodputTotals] = {}
        self._unsaved: set[RankKey] = set()
        # Runs of which a rank does what the others may have to wait for.
        self._paused: set[str] = set()
        self.health = WorkerHealth("goodput")

    async def run(self) -> None:
        """Look once a second, until cancelled."""
        looks = 0
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                await self.look()
                looks += 1
                if looks % _SAVE_EVERY == 0:
                    await self.save()
                self.health.succeeded(self._clocks.unix_ns() / 1e9)
            except Exception:
                self.health.failed()
                # A book-keeper that fails is no reason for a daemon to.
                log.exception("goodput was not accounted for")

    async def look(self) -> None:
        """Take what the ranks have reported, and which of them are alive."""
        present = {(rank.identity.run, rank.identity.rank): rank for rank in self._store.ranks()}
        self._paused = {
            rank.identity.run for rank in present.values() if rank.connected and rank.state in _PAUSES
        }
        for key, followed in list(self._followed.items()):
            self._observe(key, followed)
            if present.get(key) is not followed.rank and (key in present or not self._is_alive(followed)):
                self._let_go(key)
        for key, rank in present.items():
            if key not in self._followed:
                await self._admit(key, rank)
                self._observe(key, self._followed[key])

    async def save(self) -> None:
        """Keep what has changed; what belongs to no run that is here is forgotten then."""
        if not self._unsaved:
            return
        documents = self._take_unsaved()
        await asyncio.to_thread(self._book.save, documents, self._time().now())
        here = {run for run, _ in self._followed} | {rank.identity.run for rank in self._store.ranks()}
        for key in [key for key in self._ledgers if key[0] not in here]:
            del self._ledgers[key]

    def close(self) -> None:
        """Settle and keep everything, for the last time; blocks for a moment."""
        for key, followed in list(self._followed.items()):
            self._observe(key, followed)
            if followed.exit is not None:
                followed.exit.close()
        if self._unsaved:
            self._book.save(self._take_unsaved(), self._time().now())
        self._book.close()

    async def report(self, run: str = "") -> list[RunGoodput]:
        """Return what the time of a run went to until now, or of the hundred runs that were active last."""
        for key, followed in self._followed.items():
            self._observe(key, followed)
        kept = (
            asyncio.to_thread(self._book.load, run)
            if run
            else asyncio.to_thread(self._book.newest, _MOST_RUNS)
        )
        ledgers = await kept
        ledgers |= {key: ledger for key, ledger in self._ledgers.items() if run in ("", key[0])}
        return by_run((key[0], self._rank(key, ledger)) for key, ledger in ledgers.items())[:_MOST_RUNS]

    def settled_seconds(self) -> dict[str, dict[Bucket, float]]:
        """Return rank-seconds of each run that is here, by bucket; they never shrink."""
        runs: dict[str, dict[Bucket, float]] = {}
        for (run, _), ledger in sorted(self._ledgers.items()):
            seconds = runs.setdefault(run, dict.fromkeys(Bucket, 0.0))
            for bucket, ns in list(ledger.settled.items()):
                seconds[bucket] += ns / 1e9
        return runs

    # One process.

    async def _admit(self, key: RankKey, rank: Rank) -> None:
        run = key[0]
        if not any(name == run for name, _ in self._ledgers):
            self._ledgers |= await asyncio.to_thread(self._load, run)
        clock, identity = self._time(), rank.identity
        now = clock.now()
        joined = min(now, clock.of_monotonic(rank.joined_at))
        started = clock.of_ticks(identity.process_start_ticks)
        # In a time namespace of its own a process counts from another boot.
        if not identity.process_start_ticks or not clock.of_ticks(0) <= started <= joined:
            started = joined
        process = _process(identity)
        ledger = self._ledgers.get(key)
        if ledger is None:
            self._ledgers[key] = GoodputTotals.begin(process, started)
        else:
            ledger.start(process, started, now)
        pid = identity.pid if rank.is_process_known else 0
        seen = RankProcess(*key, pid, identity.pid_namespace, identity.process_start_ticks)
        self._followed[key] = _Followed(rank, self._exits(seen, clock.now), Totals())

    def _observe(self, key: RankKey, followed: _Followed) -> None:
        clock, rank, ledger = self._time(), followed.rank, self._ledgers[key]
        at = clock.now()
        if followed.exit is not None:
            at = followed.exit.at_ns or at
        elif rank.left_at is not None:
            at = min(at, clock.of_monotonic(rank.left_at))
        totals = rank.totals
        if totals is not followed.told:
            followed.told = totals
            ledger.gpus = max(ledger.gpus, int(totals.cuda is not None))
            ledger.tell(at, claims(totals), *self._loop_times(totals, at))
        ledger.watch(at, rank.state, excused=key[0] in self._paused)
        if followed.exit is not None and followed.exit.at_ns is not None:
            ledger.end(at)
        self._unsaved.add(key)

    def _let_go(self, key: RankKey) -> None:
        followed = self._followed.pop(key)
        self._ledgers[key].end(self._ledgers[key].until_ns)
        if followed.exit is not None:
            followed.exit.close()

    def _is_alive(self, followed: _Followed) -> bool:
        if followed.exit is not None:
            return followed.exit.at_ns is None
        return followed.rank.connected

    def _loop_times(self, totals: Totals, at: int) -> tuple[int, int]:
        """Return when the first step began and the newest ended; nothing is known of an old client's."""
        if not totals.began_ns:
            return at, 0
        clock = self._time()
        return clock.of_unix(totals.began_ns), clock.of_unix(totals.ended_ns)

    # The book.

    def _time(self) -> GoodputClock:
        if self._clock is None:
            clocks = self._clocks
            offset = self._book.clock_offset(self._boot, clocks.boottime_ns(), clocks.unix_ns())
            self._clock = GoodputClock(offset, clocks)
        return self._clock

    def _load(self, run: str) -> dict[RankKey, GoodputTotals]:
        self._time()
        return self._book.load(run)

    def _take_unsaved(self) -> dict[RankKey, bytes]:
        documents = {key: packed(self._ledgers[key]) for key in self._unsaved}
        self._unsaved.clear()
        return documents

    def _rank(self, key: RankKey, ledger: GoodputTotals) -> RankGoodput:
        followed = self._followed.get(key)
        return RankGoodput(
            rank=key[1],
            since_unix_seconds=ledger.first_ns / 1e9,
            until_unix_seconds=ledger.until_ns / 1e9,
            starts=ledger.starts,
            gpus=ledger.gpus,
            running=followed is not None and self._is_alive(followed),
            seconds={bucket: ns / 1e9 for bucket, ns in ledger.buckets().items()},
        )


def claims(totals: Totals) -> Claims:
    """Return what an account claims of a rank's time."""
    train = totals.train
    data, communication = _phase(train, "data"), _phase(train, "collective_wait")
    saves, validation = _phase(train, "checkpoint"), _phase(train, "validate")
    return Claims(
        loop=totals.began_ns,
        steps=train.steps,
        step_ns=min(train.ns, _MOST_NS),
        warmup_ns=min(totals.warmup.ns, _MOST_NS),
        productive=max(0, min(train.ns, _MOST_NS) - data - communication - saves - validation),
        data_wait=data,
        communication_wait=communication,
        validation=min(totals.validate.ns, _MOST_NS) + validation,
        checkpoint=saves + (min(totals.checkpoint.ns, _MOST_NS) if totals.checkpoint else 0),
    )


def _phase(kind: KindTotal, name: str) -> int:
    phase = kind.phases.get(name)
    return min(phase.ns, _MOST_NS) if phase else 0


def _process(identity: RankIdentity) -> str:
    return f"{identity.node}-{identity.pid_namespace}-{identity.pid}-{identity.process_start_ticks}"
