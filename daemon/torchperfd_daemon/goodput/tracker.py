"""Updates the goodput totals of all ranks once a second, notes when processes end, and saves them."""

import asyncio
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from torchperfd_daemon.background import WorkerHealth, until_next_round
from torchperfd_daemon.collectors.process import RankProcess, is_here
from torchperfd_daemon.goodput.store import Clocks, GoodputClock, GoodputStore, RankKey, boot_id, packed
from torchperfd_daemon.goodput.totals import Bucket, Claims, GoodputTotals, RankGoodput, RunGoodput, by_run
from torchperfd_daemon.store.model import KindTotal, RankIdentity, State, Totals
from torchperfd_daemon.store.store import Rank, Store


def process_of(rank: Rank) -> RankProcess:
    """Return the process that a rank is; of one whose process is not known, none that there is."""
    identity = rank.identity
    return RankProcess(
        identity.run,
        identity.rank,
        identity.pid if rank.is_process_known else 0,
        identity.pid_namespace,
        identity.process_start_ticks,
        rank.totals.cuda.device_uuid if rank.totals.cuda is not None else "",
        rank.process.uid,
        rank.gid,
    )


class Exit:
    """Waits for one process to end, on the running loop.

    Args:
        fd: A pidfd of the process; :meth:`close` closes it.

    Attributes:
        at_ns: When the process ended, by that clock; None while it runs.
    """

    def __init__(self, fd: int, clock: Callable[[], int]) -> None:
        self.at_ns: int | None = None
        self._fd = fd
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(fd, self._ended)

    def close(self) -> None:
        """Stop waiting and close the descriptor."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _ended(self) -> None:
        self.at_ns = self._clock()
        self.close()


def exit_of(process: RankProcess, clock: Callable[[], int], proc: Path = Path("/proc")) -> Exit | None:
    """Start waiting for a rank's process to end; None if it has ended or cannot be observed from here."""
    if process.pid <= 0:
        return None
    try:
        fd = os.pidfd_open(process.pid)
    except OSError:
        return None
    # Checked after opening: from then on the descriptor refers to one process, even if its id is reused.
    if not is_here(proc, process):
        os.close(fd)
        return None
    return Exit(fd, clock)


log = logging.getLogger("torchperfd.goodput")

_SAVE_EVERY: Final = 5
_MAX_RUNS: Final = 100
_MAX_NS: Final = 2**62
_PAUSES: Final = (State.VALIDATING, State.CHECKPOINTING)

ExitOf = Callable[[RankProcess, Callable[[], int]], Exit | None]


@dataclass(slots=True)
class _Followed:
    """A process that the tracker samples.

    Attributes:
        seen_totals: The rank's totals at the latest sample.
    """

    rank: Rank
    exit: Exit | None
    seen_totals: Totals


class GoodputTracker:
    """Keeps the goodput totals of all ranks in the store.

    Call all methods from one event loop, except :meth:`settled_seconds`, which any thread may call.

    Args:
        boot: The id of this boot of the node.
    """

    def __init__(
        self,
        store: Store,
        saved: GoodputStore,
        clocks: Clocks | None = None,
        boot: str | None = None,
        exits: ExitOf = exit_of,
    ) -> None:
        self._store = store
        self._saved = saved
        self._clocks = clocks or Clocks()
        self._boot = boot_id() if boot is None else boot
        self._exits = exits
        self._clock: GoodputClock | None = None
        self._followed: dict[RankKey, _Followed] = {}
        self._totals: dict[RankKey, GoodputTotals] = {}
        self._unsaved: set[RankKey] = set()
        # Runs of which a rank validates or saves, so that the others may have to wait.
        self._paused: set[str] = set()
        self.health = WorkerHealth("goodput")

    async def run(self) -> None:
        """Sample once a second, until cancelled."""
        samples = 0
        while True:
            await asyncio.sleep(until_next_round())
            try:
                await self.sample()
                samples += 1
                if samples % _SAVE_EVERY == 0:
                    await self.save()
                self.health.succeeded(self._clocks.unix_ns() / 1e9)
            except Exception:
                self.health.failed()
                # A failure here must not end the daemon.
                log.exception("goodput was not updated; trying again in a second")

    async def sample(self) -> None:
        """Add what the ranks have reported, and record which of them are alive."""
        present = {(rank.identity.run, rank.identity.rank): rank for rank in self._store.ranks()}
        self._paused = {
            rank.identity.run for rank in present.values() if rank.connected and rank.state in _PAUSES
        }
        for key, followed in list(self._followed.items()):
            self._observe(key, followed)
            if present.get(key) is not followed.rank and (key in present or not self._is_alive(followed)):
                self._unfollow(key)
        for key, rank in present.items():
            if key not in self._followed:
                await self._follow(key, rank)
                self._observe(key, self._followed[key])

    async def save(self) -> None:
        """Write the totals that have changed; then drop those of runs without a rank here from memory."""
        if not self._unsaved:
            return
        documents = self._take_unsaved()
        await asyncio.to_thread(self._saved.save, documents, self._time().now())
        here = {run for run, _ in self._followed} | {rank.identity.run for rank in self._store.ranks()}
        for key in [key for key in self._totals if key[0] not in here]:
            del self._totals[key]

    def close(self) -> None:
        """Settle and save everything; blocks during the write."""
        for key, followed in list(self._followed.items()):
            self._observe(key, followed)
            if followed.exit is not None:
                followed.exit.close()
        if self._unsaved:
            self._saved.save(self._take_unsaved(), self._time().now())
        self._saved.close()

    async def report(self, run: str = "") -> list[RunGoodput]:
        """Return the goodput of a run until now, or of the hundred runs that were active last."""
        for key, followed in self._followed.items():
            self._observe(key, followed)
        kept = (
            asyncio.to_thread(self._saved.load, run)
            if run
            else asyncio.to_thread(self._saved.newest, _MAX_RUNS)
        )
        totals = await kept
        totals |= {key: goodput for key, goodput in self._totals.items() if run in ("", key[0])}
        return by_run((key[0], self._rank(key, goodput)) for key, goodput in totals.items())[:_MAX_RUNS]

    def settled_seconds(self) -> dict[str, dict[Bucket, float]]:
        """Return the settled rank-seconds of each run that is here, by bucket; they never shrink."""
        runs: dict[str, dict[Bucket, float]] = {}
        for (run, _), goodput in sorted(self._totals.items()):
            seconds = runs.setdefault(run, dict.fromkeys(Bucket, 0.0))
            for bucket, ns in list(goodput.settled.items()):
                seconds[bucket] += ns / 1e9
        return runs

    # One process.

    async def _follow(self, key: RankKey, rank: Rank) -> None:
        run = key[0]
        if not any(name == run for name, _ in self._totals):
            self._totals |= await asyncio.to_thread(self._load, run)
        clock, identity = self._time(), rank.identity
        now = clock.now()
        joined = min(now, clock.of_monotonic(rank.joined_at))
        started = clock.of_ticks(identity.process_start_ticks)
        # A process in its own time namespace counts its start ticks from another origin.
        if not identity.process_start_ticks or not clock.of_ticks(0) <= started <= joined:
            started = joined
        process = _process_text(identity)
        goodput = self._totals.get(key)
        if goodput is None:
            self._totals[key] = GoodputTotals.begin(process, started)
        else:
            goodput.start(process, started, now)
        self._followed[key] = _Followed(rank, self._exits(process_of(rank), clock.now), Totals())

    def _observe(self, key: RankKey, followed: _Followed) -> None:
        clock, rank, goodput = self._time(), followed.rank, self._totals[key]
        at = clock.now()
        if followed.exit is not None:
            at = followed.exit.at_ns or at
        elif rank.left_at is not None:
            at = min(at, clock.of_monotonic(rank.left_at))
        totals = rank.totals
        if totals is not followed.seen_totals:
            followed.seen_totals = totals
            goodput.gpus = max(goodput.gpus, int(totals.cuda is not None))
            goodput.add_claims(at, claims(totals), *self._loop_times(totals, at))
        goodput.watch(at, rank.state, excused=key[0] in self._paused)
        if followed.exit is not None and followed.exit.at_ns is not None:
            goodput.end(at)
        self._unsaved.add(key)

    def _unfollow(self, key: RankKey) -> None:
        followed = self._followed.pop(key)
        self._totals[key].end(self._totals[key].until_ns)
        if followed.exit is not None:
            followed.exit.close()

    def _is_alive(self, followed: _Followed) -> bool:
        if followed.exit is not None:
            return followed.exit.at_ns is None
        return followed.rank.connected

    def _loop_times(self, totals: Totals, at: int) -> tuple[int, int]:
        """Return when the first step began and the newest ended; ``at, 0`` if an old client omits them."""
        if not totals.began_ns:
            return at, 0
        clock = self._time()
        return clock.of_unix(totals.began_ns), clock.of_unix(totals.ended_ns)

    # Clock and database.

    def _time(self) -> GoodputClock:
        if self._clock is None:
            clocks = self._clocks
            offset = self._saved.clock_offset(self._boot, clocks.boottime_ns(), clocks.unix_ns())
            self._clock = GoodputClock(offset, clocks)
        return self._clock

    def _load(self, run: str) -> dict[RankKey, GoodputTotals]:
        self._time()
        return self._saved.load(run)

    def _take_unsaved(self) -> dict[RankKey, bytes]:
        documents = {key: packed(self._totals[key]) for key in self._unsaved}
        self._unsaved.clear()
        return documents

    def _rank(self, key: RankKey, goodput: GoodputTotals) -> RankGoodput:
        followed = self._followed.get(key)
        return RankGoodput(
            rank=key[1],
            since_unix_seconds=goodput.first_ns / 1e9,
            until_unix_seconds=goodput.until_ns / 1e9,
            starts=goodput.starts,
            gpus=goodput.gpus,
            running=followed is not None and self._is_alive(followed),
            seconds={bucket: ns / 1e9 for bucket, ns in goodput.buckets().items()},
        )


def claims(totals: Totals) -> Claims:
    """Return the claims on a rank's time that its totals contain."""
    train = totals.train
    data, communication = _phase_ns(train, "data"), _phase_ns(train, "collective_wait")
    saves, validation = _phase_ns(train, "checkpoint"), _phase_ns(train, "validate")
    return Claims(
        loop=totals.began_ns,
        steps=train.steps,
        step_ns=min(train.ns, _MAX_NS),
        warmup_ns=min(totals.warmup.ns, _MAX_NS),
        productive=max(0, min(train.ns, _MAX_NS) - data - communication - saves - validation),
        data_wait=data,
        communication_wait=communication,
        validation=min(totals.validate.ns, _MAX_NS) + validation,
        checkpoint=saves + (min(totals.checkpoint.ns, _MAX_NS) if totals.checkpoint else 0),
    )


def _phase_ns(kind: KindTotal, name: str) -> int:
    phase = kind.phases.get(name)
    return min(phase.ns, _MAX_NS) if phase else 0


def _process_text(identity: RankIdentity) -> str:
    return f"{identity.node}-{identity.pid_namespace}-{identity.pid}-{identity.process_start_ticks}"
