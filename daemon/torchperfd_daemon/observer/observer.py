"""The observer: samples all runs once a second, and reads the stacks of a run that has stalled."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from torchperfd.model.verdict_document import SettledAdvice
from torchperfd_daemon.background import WorkerHealth, until_next_round
from torchperfd_daemon.collectors.base import Family
from torchperfd_daemon.collectors.gpu_readings import GpuReading
from torchperfd_daemon.diagnosis.detect.straggler import RankWork
from torchperfd_daemon.diagnosis.edits import Pauses
from torchperfd_daemon.diagnosis.evidence import SAMPLE_S
from torchperfd_daemon.diagnosis.verdict import Cause, RunFindings, Verdict
from torchperfd_daemon.diagnosis.verdicts import MIN_STEPS
from torchperfd_daemon.observer.line_sampler import AGAIN_AFTER_S, BETWEEN_S, LineSampler
from torchperfd_daemon.observer.mean_step import verdict_on_mean_step
from torchperfd_daemon.observer.node_context import GpuState, NodeContext, Storage, survey
from torchperfd_daemon.observer.run_watch import RunWatch
from torchperfd_daemon.observer.stragglers import find_culprit
from torchperfd_daemon.stacks.model import Outcome, RankStacks
from torchperfd_daemon.store.model import RankIdentity
from torchperfd_daemon.store.store import Rank, Store

log = logging.getLogger("torchperfd.observer")

_STACKS_S: Final = 3.0
# Reading stacks costs the ranks time, and the stacks of a stalled run change little.
_STACKS_EVERY_S: Final = 10.0
_NO_GPU: Final = GpuState()


async def _no_stacks(_rank: Rank, _seconds: float) -> None:
    return None


StackProvider = Callable[[Iterable[Rank], float], AsyncIterator[RankStacks]]
"""Yields each rank's stacks, or the reason why there are none, within the given seconds."""


class Observer:
    """Keeps the verdict on each run that has ranks in the store.

    Args:
        gpus: Returns the newest reading of each GPU.
        gpu_of: Returns the UUID of a rank's GPU; empty when unknown.
        lines: Samples the lines at which ranks load data.
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
        lines: LineSampler | None = None,
    ) -> None:
        self._store = store
        self._stacks_of = stacks_of
        self._families = families
        self._gpus = gpus
        self._gpu_of = gpu_of
        self._clock = clock
        self._wall = wall
        self._lines = lines or LineSampler(_no_stacks)
        self._runs: dict[str, RunWatch] = {}
        self._storage: Storage | None = None
        self._stacks_read_at: dict[str, float] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._sampling: set[asyncio.Task[None]] = set()
        self._sampled_at = clock()
        self.health = WorkerHealth("diagnosis")

    async def run(self) -> None:
        """Sample once a second until cancelled."""
        try:
            while True:
                await asyncio.sleep(until_next_round())
                try:
                    for run in self._sampled_runs():
                        if run:
                            self._start_reading_stacks(run)
                        # Requests are answered between two runs, however many there are.
                        await asyncio.sleep(0)
                    for _ in self._sampled_lines():
                        await asyncio.sleep(0)
                    self.health.succeeded(self._wall())
                except Exception:
                    # A failure here must not end the daemon. It is logged once until a sample succeeds.
                    if self.health.failed():
                        log.exception("diagnosis failed; trying again every %.0f s", SAMPLE_S)
        finally:
            tasks = [*self._tasks.values(), *self._sampling]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def sample(self) -> list[str]:
        """Sample all runs once; return the stalled runs whose stacks are to be read now."""
        return [run for run in self._sampled_runs() if run]

    def _sampled_runs(self) -> Iterator[str]:
        """Sample one run after the other; yield its name if its stacks are to be read now, else nothing."""
        began = self._clock()
        elapsed, self._sampled_at = began - self._sampled_at, began
        runs = self._store.runs()
        context = survey(self._families(), self._gpus(), self._storage) if runs else NodeContext()
        self._storage = context.storage if runs else None
        for gone in self._runs.keys() - runs.keys():
            del self._runs[gone]
        self._lines.forget_others(runs.keys())
        for run, ranks in runs.items():
            now, wall = self._clock(), self._wall()
            watch = self._runs[run] = self._runs.get(run) or RunWatch(run)
            if watch.sample(ranks, now, wall, context, lambda rank: self._gpu(rank, context)):
                _log_verdict(watch)
            watch.add_hang_cost(elapsed)
            if watch.stall is None:
                self._stacks_read_at.pop(run, None)
            yield run if watch.stall is not None and self._is_due(run, watch, now) else ""

    async def read_stacks(self, run: str) -> None:
        """Read the stacks of a stalled run, and set the verdict on its hang."""
        self._stacks_read_at[run] = self._clock()
        ranks = self._store.runs().get(run, [])
        stacks = [each async for each in self._stacks_of(ranks, _STACKS_S)]
        watch = self._runs.get(run)
        stall = watch.stall if watch else None
        if watch is None or stall is None:
            return
        world = max((rank.identity.world_size for rank in ranks), default=1)
        verdict = find_culprit(run, stacks, stall, world)
        if verdict is None:
            return
        stopped = {each.rank for each in stacks if each.outcome is Outcome.STOPPED}
        for rank in ranks:
            rank.stopped = rank.identity.rank in stopped
        if watch.set_hang(verdict):
            log.warning("run %s: %s", run, verdict.summary)

    def verdict(self, run: str) -> Verdict | None:
        """Return the present verdict on a run, or the costliest one if the run is over; None without any."""
        verdict = self._verdict(run)
        return verdict and self._lines.with_lines(verdict)

    def _verdict(self, run: str) -> Verdict | None:
        watch = self._runs.get(run)
        if watch is None:
            return None
        if watch.is_over:
            found = watch.final() or self._sampled_early(run)
            return self._with_account(run, watch, self._with_growth(run, watch, found))
        if not watch.verdicts:
            return None
        first, *others = watch.verdicts
        # During a hang no steps end, so other causes cost nothing; memory that grows may be why.
        others = [*first.others, *others]
        if first.cause is Cause.HANG:
            others = [each for each in others if each.cause is Cause.MEMORY_PRESSURE]
        return replace(first, others=tuple(sorted(others, key=lambda each: -each.share)))

    def _with_growth(self, run: str, watch: RunWatch, found: Verdict | None) -> Verdict | None:
        """Return the verdict on an ended run with the growth of its memory, which costs no time itself."""
        growth = watch.growth
        if growth is None:
            return found
        found = found or verdict_on_mean_step(run, self._store.runs().get(run, []))
        if any(each.cause is growth.cause for each in (found, *found.others)):
            return found
        return replace(found, others=(*found.others, growth))

    def _with_account(self, run: str, watch: RunWatch, found: Verdict | None) -> Verdict | None:
        """Return the verdict on an ended run with the last account of its step, if it lacks one."""
        if watch.account is None or (found is not None and found.account is not None):
            return found
        found = found or verdict_on_mean_step(run, self._store.runs().get(run, []))
        return found if found.cause is Cause.HANG else replace(found, account=watch.account)

    def _sampled_early(self, run: str) -> Verdict | None:
        """Return the verdict on the mean step of a run, if its line is known."""
        verdict = self._lines.with_lines(verdict_on_mean_step(run, self._store.runs().get(run, [])))
        return verdict if verdict.line or any(other.line for other in verdict.others) else None

    def settle_loader_advice(self, run: str) -> SettledAdvice | None:
        """Settle what a run is advised on its loaders, if it is not yet; None while too little was seen."""
        watch = self._runs.get(run)
        return watch.settle_loader_advice() if watch else None

    def device_work(self, rank: Rank) -> RankWork | None:
        """Return a rank's newest steps on its device, in means of a second; None without device times."""
        watch = self._runs.get(rank.identity.run)
        return watch.device_work(rank) if watch else None

    def collections(self, rank: Rank) -> Sequence[Pauses]:
        """Return a rank's garbage collections since its steps last changed; none where that is not known."""
        watch = self._runs.get(rank.identity.run)
        return watch.collections(rank) if watch else ()

    def verdicts(self, run: str) -> tuple[Verdict, ...]:
        """Return all published verdicts on a run, the costliest first."""
        watch = self._runs.get(run)
        return watch.verdicts if watch else ()

    def findings(self, run: str) -> RunFindings | None:
        """Return the findings on a run; None if the run is unknown."""
        watch = self._runs.get(run)
        return watch.findings if watch else None

    def lost_seconds(self) -> dict[str, Mapping[Cause, float]]:
        """Return the seconds that each cause has cost each run so far."""
        return {run: dict(watch.lost) for run, watch in self._runs.items()}

    def stragglers(self) -> dict[str, Mapping[int, float]]:
        """Return each run's stragglers, with the seconds per step by which they are late."""
        return {run: dict(watch.lateness.seconds) for run, watch in self._runs.items()}

    def _gpu(self, rank: Rank, context: NodeContext) -> GpuState:
        return context.gpus.get(self._gpu_of(rank.identity), _NO_GPU) if context.gpus else _NO_GPU

    def _is_due(self, run: str, watch: RunWatch, now: float) -> bool:
        read_at = self._stacks_read_at.get(run)
        settled = watch.hang is not None and watch.hang.rank is not None
        return not settled and (read_at is None or now - read_at >= _STACKS_EVERY_S)

    def _start_reading_stacks(self, run: str) -> None:
        task = self._tasks.get(run)
        if task is None or task.done():
            self._tasks = {name: each for name, each in self._tasks.items() if not each.done()}
            self._tasks[run] = asyncio.get_running_loop().create_task(self._try_reading_stacks(run))

    async def _try_reading_stacks(self, run: str) -> None:
        try:
            await self.read_stacks(run)
        except Exception:
            log.exception("run %s has stalled, and reading its stacks failed", run)

    def _sampled_lines(self) -> Iterator[None]:
        """Start to sample the slow line of each run for which that is due, one after the other."""
        ranks = self._store.runs()
        for run, watch in list(self._runs.items()):
            yield
            here = ranks.get(run, [])
            due = self._lines.due(watch.verdicts or _early_verdicts(run, here), here)
            if due is not None:
                again_after = AGAIN_AFTER_S if watch.verdicts else BETWEEN_S
                task = asyncio.get_running_loop().create_task(self._try_sampling_line(*due, again_after))
                self._sampling.add(task)
                task.add_done_callback(self._sampling.discard)

    async def _try_sampling_line(self, verdict: Verdict, rank: Rank, again_after: float) -> None:
        try:
            line = await self._lines.sample(verdict, rank, again_after)
            if line is not None:
                log.warning("run %s: slow line: %s", verdict.run, line.words)
        except Exception:
            log.exception("run %s waits for its data, and sampling its stacks failed", verdict.run)


def _early_verdicts(run: str, ranks: Sequence[Rank]) -> tuple[Verdict, ...]:
    """Return the verdicts on the mean step of a run that has none: it may end before one is published."""
    if not ranks or any(rank.steady_steps < MIN_STEPS for rank in ranks):
        return ()
    first = verdict_on_mean_step(run, ranks)
    return first, *first.others


def _log_verdict(watch: RunWatch) -> None:
    if not watch.verdicts:
        log.info("run %s: verdict withdrawn", watch.run)
        return
    verdict = watch.verdicts[0]
    quiet = verdict.cause is Cause.NONE
    log.log(logging.INFO if quiet else logging.WARNING, "run %s: %s", watch.run, verdict.summary)
