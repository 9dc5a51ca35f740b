"""Owners of the simulated GPUs and ranks."""

from collections.abc import Callable, Sequence
from typing import Final

from torchperfd_daemon.collectors.base import Family
from torchperfd_daemon.collectors.gpu_base import GpuReading
from torchperfd_daemon.ownership import Owner
from torchperfd_daemon.simulated.ranks import RUN
from torchperfd_daemon.store import RankIdentity

_SLURM_JOB: Final = "4242"


class SimulatedOwners:
    """A collector that gives every simulated GPU to one Slurm job, the simulated run's.

    Args:
        gpus: Returns the newest reading of each GPU.
    """

    name = "ownership"

    def __init__(self, gpus: Callable[[], Sequence[GpuReading]]) -> None:
        self._gpus = gpus

    def of(self, identity: RankIdentity) -> Owner:
        """Return whose a rank is."""
        if identity.run != RUN:
            return Owner(slurm_job_id=identity.slurm_job_id, pod_uid=identity.pod_uid)
        uuids = {reading.gpu: reading.uuid for reading in self._gpus()}
        return Owner(slurm_job_id=_SLURM_JOB, gpu_uuid=uuids.get(str(identity.local_rank), ""))

    def sample(self) -> Sequence[Family]:
        """Return the owners of the simulated GPUs."""
        family = Family(
            "gpu_allocation_info",
            "Who a GPU was given to, and by what.",
            "gauge",
            ("gpu", "gpu_uuid", "allocator", "allocation"),
        )
        for reading in self._gpus():
            family.add(1, reading.gpu, reading.uuid, "slurm", _SLURM_JOB)
        return [family]
