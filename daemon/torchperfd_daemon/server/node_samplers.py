"""The samplers of one node: its hardware, its GPUs and their owners, each on a thread of its own kind."""

import asyncio
import itertools
import logging
import time
from collections.abc import Iterator
from typing import Final

from torchperfd_daemon.background import WorkerHealth
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
from torchperfd_daemon.collectors.process import ProcessCollector, RankProcess, Ranks
from torchperfd_daemon.goodput.tracker import process_of
from torchperfd_daemon.ownership import OwnershipCollector
from torchperfd_daemon.simulated import SimulatedGpuCollector, SimulatedOwners
from torchperfd_daemon.store import RankIdentity, Store

log = logging.getLogger("torchperfd.server")

# Owners change with jobs, not with steps, and finding them asks the kubelet.
_OWNERSHIP_INTERVAL_S: Final = 5.0
_REPLACE_INTERVAL_S: Final = 2.0


class NodeSamplers:
    """All samplers of one node, and the threads that they run on.

    The kernel's files share one thread. The GPU driver and the kubelet may be slow, so each has its own.

    Args:
        interval: Seconds between two samples; owners are sampled at most every five seconds.
        simulated: Sample simulated GPUs instead of this node's.
    """

    def __init__(self, store: Store, interval: float, *, simulated: bool) -> None:

        def ranks() -> Iterator[RankProcess]:
            return map(process_of, store.ranks())

        seldom = max(interval, _OWNERSHIP_INTERVAL_S)
        self.gpus = NewestGpuReadings(SimulatedGpuCollector() if simulated else NvmlCollector(), ranks)
        self.owners: SimulatedOwners | OwnershipCollector = (
            SimulatedOwners(self.gpus.newest) if simulated else OwnershipCollector(ranks, self.gpus.newest)
        )
        host = [Sampler(collector, interval) for collector in _host_collectors(ranks)]
        gpu, owner = Sampler(self.gpus, interval), Sampler(self.owners, seldom)
        self.samplers = [*host, gpu, owner]
        self.health = WorkerHealth("collectors")
        self._schedulers = [
            CollectorScheduler(host, interval),
            CollectorScheduler([gpu], interval),
            CollectorScheduler([owner], seldom),
        ]

    def start(self) -> None:
        """Start sampling."""
        for scheduler in self._schedulers:
            scheduler.start()

    def stop(self) -> None:
        """Stop sampling; a thread that hangs in its collector is abandoned."""
        for scheduler in self._schedulers:
            scheduler.stop()

    async def run(self) -> None:
        """Replace threads that hang in a collector, until cancelled."""
        while True:
            await asyncio.sleep(_REPLACE_INTERVAL_S)
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

    def families(self) -> Iterator[Family]:
        """Return the newest samples."""
        return itertools.chain.from_iterable(sampler.families for sampler in self.samplers)


def _host_collectors(ranks: Ranks) -> list[Collector]:
    return [
        CpuCollector(),
        MemoryCollector(),
        DiskCollector(),
        NetworkCollector(),
        PressureCollector(),
        ProcessCollector(ranks),
        CgroupCollector(ranks),
    ]
