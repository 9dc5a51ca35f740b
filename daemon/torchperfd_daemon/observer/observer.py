"""The observer: looks at all runs once a second, and asks for stacks where one stands still."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final, Protocol

from torchperfd_daemon.background import WorkerHealth
from torchperfd_daemon.collectors.base import Family
from torchperfd_daemon.collectors.gpu_base import GpuReading
from torchperfd_daemon.diagnosis import Cause, RunFindings, Verdict
from torchperfd_daemon.observer.hang import find_culprit
from torchperfd_daemon.observer.node_context import GpuState, NodeContext, Storage, survey
from torchperfd_daemon.observer.run_watch import RunWatch
from torchperfd_daemon.stacks import Outcome, RankStacks
from torchperfd_daemon.store import Rank, RankIdentity, Store

log = logging.getLogger("torchperfd.observer")

LOOK_S: Final = 1.0

_STACKS_S: Final = 3.0
# A rank runs Python to answer; a stall changes little once it is one.
_ASK_AGAIN_S: Final = 10.0
_NO_GPU: Final = GpuState()


class StackProvider(Protocol):
    """Returns the stacks of ranks of this node."""

    def __call__(self, ranks: Iterable[Rank], seconds: float, /) -> AsyncIterator[RankStacks]:
        """Yield each rank's stacks, or why there are none, within so many seconds."""


class Observer:
    """Keeps the verdict on each run that the store has ranks of.

    Args:
        store: Where ranks and their steps are.
        stacks_of: Returns the stacks of ranks.
        families: Returns the collectors' newest samples.
        gpus: Returns the newest reading of each GPU.
        gpu_of: Tells the UUID of a rank's GPU; empty when unknown.
        clock: Monotonic seconds.
        wall: Unix seconds.
    """

    def __init__(
        self,
        store: Store,
        stacks_of: StackProvider,
        families: Callable[[], Iterable[Family]] = tuple,
        gpus: Callable[[], Sequence[GpuReading]] = tuple,
        gpu_of: Callable[[RankIdentity], str] = lambda _: "",
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._stacks_of = stacks_of
        self._families = families
        self._gpus = gpus
        self._gpu_of = gpu_of
        self._clock = clock
        self._wall = wall
        self._runs: dict[str, RunWatch] = {}
        self._storage: Storage | None = None
        self._asked: dict[str, float] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._looked_at = clock()
        self.health = WorkerHealth("diagnosis")

    async def run(self) -> None:
        """Look once a second until cancelled."""
        try:
            while True:
                await asyncio.sleep(LOOK_S)
                try:
                    for run in self.look():
                        self._begin_to_ask(run)
                    self.health.succeeded(self._wall())
                except Exception:
                    # An observer that fails is no reason for a daemon to; once is enough to say so.
                    if self.health.failed():
                        log.exception("the ranks cannot be looked at")
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def look(self) -> list[str]:
        """Look at everything once; return the runs that stand still and whose stacks are due."""
        now, wall = self._clock(), self._wall()
        runs = self._store.runs()
        around = survey(self._families(), self._gpus(), self._storage) if runs else NodeContext()
        self._storage = around.storage if runs else None
        known, self._runs = self._runs, {}
        due = []
        for run, ranks in runs.items():
            watch = self._runs[run] = known.get(run) or RunWatch(run)
            if watch.look(ranks, now, wall, around, lambda rank: self._gpu(rank, around)):
                _say(watch)
            watch.stand(now - self._looked_at)
            if watch.stall is None:
                self._asked.pop(run, None)
            elif self._is_due(run, watch, now):
                due.append(run)
        self._looked_at = now
        return due

    async def ask(self, run: str) -> None:
        """Ask the ranks of a run that stands still where they are, and whose fault it is."""
        self._asked[run] = self._clock()
        ranks = self._store.runs().get(run, [])
        told = [each async for each in self._stacks_of(ranks, _STACKS_S)]
        watch = self._runs.get(run)
        stall = watch.stall if watch else None
        if watch is None or stall is None:
            return
        world = max((rank.identity.world_size for rank in ranks), default=1)
        verdict = find_culprit(run, told, stall, world)
        if verdict is None:
            return
        stopped = {each.rank for each in told if each.outcome is Outcome.STOPPED}
        for rank in ranks:
            rank.stopped = rank.identity.rank in stopped
        if watch.tell_hang(verdict):
            log.warning("run %s: %s", run, verdict.summary)

    def verdict(self, run: str) -> Verdict | None:
        """Return the present verdict on a run, and of one that is over what has cost it most; else None."""
        watch = self._runs.get(run)
        if watch is None:
            return None
        if watch.over:
            return watch.final()
        if not watch.verdicts:
            return None
        first, *others = watch.verdicts
        # During a hang there are no steps for other causes to cost anything of.
        others = [] if first.cause is Cause.HANG else [*first.others, *others]
        return replace(first, others=tuple(sorted(others, key=lambda each: -each.cost_seconds_per_step)))

    def verdicts(self, run: str) -> tuple[Verdict, ...]:
        """Return all that holds of a run, the costliest first; empty while nothing has held yet."""
        watch = self._runs.get(run)
        return watch.verdicts if watch else ()

    def findings(self, run: str) -> RunFindings | None:
        """Return what has been found of a run; None for one that is not known."""
        watch = self._runs.get(run)
        return watch.findings if watch else None

    def lost_seconds(self) -> dict[str, Mapping[Cause, float]]:
        """Return what each cause has cost each run so far."""
        return {run: dict(watch.lost) for run, watch in self._runs.items()}

    def stragglers(self) -> dict[str, Mapping[int, float]]:
        """Return each run's ranks that the others wait for, with the seconds per step they are late by."""
        return {run: dict(watch.lateness.seconds) for run, watch in self._runs.items()}

    def _gpu(self, rank: Rank, around: NodeContext) -> GpuState:
        return around.gpus.get(self._gpu_of(rank.identity), _NO_GPU) if around.gpus else _NO_GPU

    def _is_due(self, run: str, watch: RunWatch, now: float) -> bool:
        asked = self._asked.get(run)
        settled = watch.hang is not None and watch.hang.rank is not None
        return not settled and (asked is None or now - asked >= _ASK_AGAIN_S)

    def _begin_to_ask(self, run: str) -> None:
        task = self._tasks.get(run)
        if task is None or task.done():
            self._tasks = {name: each for name, each in self._tasks.items() if not each.done()}
            self._tasks[run] = asyncio.get_running_loop().create_task(self._ask_safely(run))

    async def _ask_safely(self, run: str) -> None:
        try:
            await self.ask(run)
        except Exception:
            log.exception("run %s stands still, and its ranks cannot be asked where", run)


def _say(watch: RunWatch) -> None:
    if not watch.verdicts:
        log.info("run %s: what was found does not hold any more", watch.run)
        return
    verdict = watch.verdicts[0]
    quiet = verdict.cause is Cause.NONE
    log.log(logging.INFO if quiet else logging.WARNING, "run %s: %s", watch.run, verdict.summary)
