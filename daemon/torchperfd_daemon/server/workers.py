"""The daemon's workers: samplers of the node, work on captures, and a check of the steps after each capture.

A profiler that stays in the process slows training for the rest of the run: CUPTI did, unless it was removed
(docs/captures.md). The check needs no part of the training process: the store has the durations.
"""

import asyncio
import contextlib
import itertools
import logging
import math
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from torchperfd.model.formatting import duration
from torchperfd_daemon.background import WorkerHealth, run_in_background, until_next_round
from torchperfd_daemon.captures.analyst import Analyst
from torchperfd_daemon.captures.catalog import Catalog
from torchperfd_daemon.captures.destination import Destination, remove_upload_marker, write_upload_marker
from torchperfd_daemon.captures.manifest import CaptureRecord, CaptureState, RankTrace
from torchperfd_daemon.captures.retention import Quota
from torchperfd_daemon.captures.retention_worker import RetentionWorker
from torchperfd_daemon.captures.uploader import Uploader
from torchperfd_daemon.collectors.base import Collector, CollectorScheduler, Family, Sampler
from torchperfd_daemon.collectors.cgroup import CgroupCollector
from torchperfd_daemon.collectors.gpu_readings import NewestGpuReadings
from torchperfd_daemon.collectors.node import (
    CpuCollector,
    DiskCollector,
    MemoryCollector,
    NetworkCollector,
    PressureCollector,
)
from torchperfd_daemon.collectors.nvml import NvmlCollector
from torchperfd_daemon.collectors.process import RankFiles, RankProcess, Ranks
from torchperfd_daemon.collectors.process_usage import ProcessCollector
from torchperfd_daemon.config.options import COLLECTORS, ServeSettings
from torchperfd_daemon.diagnosis.detect.robust_statistics import robust_deviation
from torchperfd_daemon.errors import TorchperfdError
from torchperfd_daemon.goodput.tracker import process_of
from torchperfd_daemon.ownership import OwnershipCollector, Pod, UserNames
from torchperfd_daemon.simulated import SimulatedGpuCollector, SimulatedOwners
from torchperfd_daemon.store.model import RankIdentity
from torchperfd_daemon.store.store import Rank, Store

log = logging.getLogger("torchperfd.server")

# Owners change with jobs, not with steps, and finding them asks the kubelet.
_OWNERSHIP_INTERVAL_S: Final = 5.0


class NodeSamplers:
    """All samplers of one node, and the threads that they run on.

    The kernel's files share one thread. The GPU driver and the kubelet may be slow, so each has its own.

    Args:
        interval: Seconds between two samples; owners are sampled at most every five seconds.
        simulated: Sample simulated GPUs instead of this node's.
        names_users: Look up the name of each rank's user.
        collectors: Which of the collectors run; the others have neither a sampler nor a thread.

    Attributes:
        watched: The health of the thread of the kernel's files, none if that samples nothing. The other
            threads are not watched: a driver that hangs would hang the next daemon as well.
    """

    def __init__(
        self,
        store: Store,
        interval: float,
        *,
        simulated: bool,
        names_users: bool,
        collectors: Collection[str] = COLLECTORS,
    ) -> None:

        def ranks() -> Iterator[RankProcess]:
            return map(process_of, store.ranks())

        seldom = max(interval, _OWNERSHIP_INTERVAL_S)
        self.gpus = NewestGpuReadings(SimulatedGpuCollector() if simulated else NvmlCollector(), ranks)
        self.users = UserNames()
        self.owners: SimulatedOwners | OwnershipCollector = (
            SimulatedOwners(self.gpus.newest)
            if simulated
            else OwnershipCollector(ranks, self.gpus.newest, users=self.users if names_users else None)
        )
        host = [Sampler(collector, interval) for collector in _host_collectors(ranks, collectors)]
        gpu = [Sampler(self.gpus, interval)] if "gpu" in collectors else []
        owner = [Sampler(self.owners, seldom)] if "owners" in collectors else []
        self.samplers = [*host, *gpu, *owner]
        self.health = WorkerHealth("collectors")
        groups = ((host, interval), (gpu, interval), (owner, seldom))
        self._schedulers = [CollectorScheduler(samplers, every) for samplers, every in groups if samplers]
        self.watched = [self._schedulers[0].health] if host else []

    def start(self) -> None:
        for scheduler in self._schedulers:
            scheduler.start()

    def stop(self) -> None:
        """Stop sampling; a thread that hangs in its collector is abandoned."""
        for scheduler in self._schedulers:
            scheduler.stop()

    async def run(self) -> None:
        """Replace threads that hang in a collector, until cancelled."""
        while True:
            await asyncio.sleep(1 + until_next_round())
            try:
                for scheduler in self._schedulers:
                    scheduler.replace_worker()
                self.health.succeeded(time.time())
            except Exception:
                # The system may refuse a new thread now, and allow it the next time.
                if self.health.failed():
                    log.exception("collectors that hang cannot be replaced")

    def gpu_of(self, identity: RankIdentity) -> str:
        """Return the index of a rank's GPU on this node; empty if it is not known."""
        uuid = self.owners.of(identity).gpu_uuid
        return next((gpu.gpu for gpu in self.gpus.newest() if uuid and gpu.uuid == uuid), "")

    def pod_of(self, identity: RankIdentity) -> Pod | None:
        """Return a rank's pod; None if it is not known for certain."""
        return self.owners.pod_of(identity) if isinstance(self.owners, OwnershipCollector) else None

    def families(self) -> Iterator[Family]:
        """Return the newest samples."""
        return itertools.chain.from_iterable(sampler.families for sampler in self.samplers)


_OF_THE_NODE: Final[Mapping[str, Callable[[], Collector]]] = {
    "cpu": CpuCollector,
    "memory": MemoryCollector,
    "disk": DiskCollector,
    "network": NetworkCollector,
    "pressure": PressureCollector,
}


def _host_collectors(ranks: Ranks, chosen: Collection[str]) -> list[Collector]:
    made = [make() for name, make in _OF_THE_NODE.items() if name in chosen]
    if "process" not in chosen:
        return made
    files = RankFiles(Path("/proc"))
    return [*made, ProcessCollector(ranks, files=files), CgroupCollector(ranks, files=files)]


class CaptureWorkers:
    """What works on the captures directory: its quota, and analysis and uploads if configured.

    Args:
        destination: Where captures are uploaded to; None for nowhere.

    Attributes:
        catalog: The captures directory.
        retention: Keeps it within its quota.
    """

    def __init__(self, settings: ServeSettings, destination: Destination | None) -> None:
        self._settings = settings
        quota = Quota(
            bytes=settings.captures_max_bytes,
            age_seconds=settings.captures_max_age_seconds,
            count=settings.captures_max_count,
            capture_bytes=settings.captures_max_bytes_each,
            free_bytes=settings.captures_min_free_bytes,
        )
        self.catalog = Catalog(settings.captures_dir, quota)
        self.uploader = Uploader(self.catalog, destination) if destination is not None else None
        self.retention = RetentionWorker(self.catalog, uploads=self.uploader is not None)
        self.analyst = Analyst(self.catalog) if settings.analyze_captures else None

    @property
    def health(self) -> list[WorkerHealth]:
        workers = (self.retention, self.uploader, self.analyst)
        return [worker.health for worker in workers if worker is not None]

    def start(self, stack: contextlib.AsyncExitStack) -> None:
        """Start the workers; they stop with the stack."""
        if self._settings.is_service:
            self.catalog.make_private()
        self._mark_uploads()
        self.retention.start()
        stack.callback(self.retention.stop)
        if self.analyst is not None:
            self.analyst.start()
            stack.callback(self.analyst.stop)
        if self.uploader is not None:
            # Joined at the end: it must release its references before the interpreter ends.
            run_in_background(stack, self.uploader.run(), seconds=min(1.0, self._settings.drain_seconds))

    def _mark_uploads(self) -> None:
        """Write the upload marker beside the captures, for commands that do not connect to a daemon."""
        if self.uploader is not None:
            write_upload_marker(self._settings.captures_dir, self.uploader.url)
        elif not self._settings.embedded:
            # A run's own daemon leaves the marker of the user's other daemons alone.
            remove_upload_marker(self._settings.captures_dir)

    def submit(self, record: CaptureRecord) -> None:
        """Have a capture that has ended analysed."""
        # A run's own daemon shares its cores: it analyses only what the end of the run shows.
        if self.analyst is not None and (record.options.automatic or not self._settings.embedded):
            self.analyst.submit(record)


log_of_captures = logging.getLogger("torchperfd.captures")

STEPS: Final = 64
"""Steps that are compared on each side of a capture."""
MIN_COMPARED_STEPS: Final = 16
"""With fewer on either side within :data:`GIVE_UP_S`, nothing is known."""
GIVE_UP_S: Final = 600.0
MAX_CHANGE: Final = 0.01
"""Steps that have become longer by more than this, beyond chance, are a warning."""

_SKIPPED: Final = 2
"""Steps after the last one captured: training pauses in the first, and may catch up in the next."""
_MAX_WAITING: Final = 256
_CHANCE: Final = 3.0
_MEDIAN_ERROR: Final = math.sqrt(math.pi / 2)
"""The standard error of a median, as a multiple of that of a mean."""


@dataclass(frozen=True, slots=True)
class StepChange:
    """How much longer steps take than before.

    Attributes:
        before: The median step before, in seconds.
        after: The median step after.
        error: The standard error of their difference.
    """

    before: float
    after: float
    error: float

    @property
    def ratio(self) -> float:
        """The difference as a part of the step before; negative where steps are shorter."""
        return self.after / self.before - 1

    @property
    def is_slower(self) -> bool:
        """Whether steps are longer by more than :data:`MAX_CHANGE`, beyond chance."""
        return self.after - self.before > MAX_CHANGE * self.before + _CHANCE * self.error


def compare_steps(before: Sequence[int], after: Sequence[int]) -> StepChange | None:
    """Compare steps by their medians; None with fewer than :data:`MIN_COMPARED_STEPS` on a side.

    Args:
        before: Durations in nanoseconds.
        after: The same after the capture.
    """
    if min(len(before), len(after)) < MIN_COMPARED_STEPS:
        return None
    middles = [statistics.median(side) / 1e9 for side in (before, after)]
    errors = [_MEDIAN_ERROR * robust_deviation(side) / math.sqrt(len(side)) / 1e9 for side in (before, after)]
    return StepChange(middles[0], middles[1], math.hypot(*errors)) if middles[0] > 0 else None


@dataclass(slots=True)
class _Waiting:
    """A captured rank whose next steps are awaited."""

    record: CaptureRecord
    trace: RankTrace
    rank: Rank
    before: Sequence[int]
    first: int
    until: float


class StepCheck:
    """Compares the steps of captured ranks on this node before and after a capture.

    Args:
        store: Where steps arrive.
        catalog: Whose manifests are completed by ``step_change``.
    """

    def __init__(
        self,
        store: Store,
        catalog: Catalog,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._catalog = catalog
        self._clock = clock
        self._wall = wall
        self._before: dict[str, dict[Rank, Sequence[int]]] = {}
        self._waiting: list[_Waiting] = []
        self.health = WorkerHealth("step check")

    def begin(self, record: CaptureRecord) -> None:
        """Keep the newest steps of the ranks that a capture is about to record."""
        while len(self._before) >= _MAX_WAITING:
            del self._before[next(iter(self._before))]
        self._before[record.capture_id] = {
            rank: rank.history.newest(min(STEPS, rank.steady_steps)).duration_ns
            for rank in self._ranks(record)
        }

    def end(self, record: CaptureRecord) -> None:
        """Await the next steps of the ranks that a capture has recorded."""
        before = self._before.pop(record.capture_id, None)
        traces = {trace.rank: trace for trace in record.ranks if trace.state is CaptureState.COMPLETE}
        if record.step_range is None or not traces:
            return
        if before is None:
            # A script captured itself: what is held of the steps before has to do.
            before = {rank: _steps_before(rank, record.step_range[0]) for rank in self._ranks(record)}
        for rank, durations in before.items():
            trace = traces.get(rank.identity.rank)
            if trace is not None and len(self._waiting) < _MAX_WAITING:
                first = record.step_range[1] + _SKIPPED
                until = self._clock() + GIVE_UP_S
                self._waiting.append(_Waiting(record, trace, rank, durations, first, until))

    def check(self) -> None:
        """Compare the ranks that have made enough steps since."""
        due = [each for each in self._waiting if self._is_due(each)]
        if not due:
            return
        self._waiting = [each for each in self._waiting if each not in due]
        for record in {id(each.record): each.record for each in due}.values():
            self._complete(record, [each for each in due if each.record is record])

    async def run(self) -> None:
        """Check once a second until cancelled."""
        while True:
            await asyncio.sleep(until_next_round())
            try:
                self.check()
                self.health.succeeded(self._wall())
            except Exception:
                if self.health.failed():
                    log_of_captures.exception("steps after a capture were not checked")

    def _ranks(self, record: CaptureRecord) -> list[Rank]:
        taking_part = {trace.rank for trace in record.ranks}
        ranks = self._store.runs().get(record.run, [])
        return [rank for rank in ranks if rank.connected and rank.identity.rank in taking_part]

    def _is_due(self, waiting: _Waiting) -> bool:
        made = waiting.rank.totals.train.steps - waiting.first
        return made >= STEPS or self._clock() >= waiting.until or not waiting.rank.connected

    def _complete(self, record: CaptureRecord, due: list[_Waiting]) -> None:
        slower = []
        for each in due:
            made = max(0, each.rank.totals.train.steps - each.first)
            after = each.rank.history.newest(made).duration_ns
            change = compare_steps(each.before, after[:STEPS])
            if change is not None:
                each.trace.step_change = round(change.ratio, 4)
                if change.is_slower:
                    slower.append((each.trace.rank, change))
        try:
            self._catalog.update(record)
        except TorchperfdError as error:
            log_of_captures.info("capture %s: its steps were checked, but %s", record.capture_id, error)
        if slower:
            rank, change = max(slower, key=lambda each: each[1].ratio)
            log_of_captures.warning(
                "capture %s: steps take longer since then, on rank %d %s instead of %s (%+.1f%%);"
                " docs/captures.md says what a profiler leaves behind",
                record.capture_id,
                rank,
                duration(change.after),
                duration(change.before),
                100 * change.ratio,
            )


def _steps_before(rank: Rank, step: int) -> Sequence[int]:
    """Return up to :data:`STEPS` durations before a step, as far as they are held."""
    durations = rank.history.newest(rank.steady_steps).duration_ns
    later = max(0, rank.totals.train.steps - step)
    return durations[: len(durations) - later][-STEPS:] if later < len(durations) else ()
