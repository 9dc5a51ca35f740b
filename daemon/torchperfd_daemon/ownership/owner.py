"""The owner of a rank: its job, pod and GPU, as named by the launcher."""

from collections.abc import Callable
from dataclasses import dataclass

from torchperfd_daemon.store import RankIdentity


@dataclass(frozen=True, slots=True)
class Owner:
    """The owner of a rank; unknown fields are empty.

    Attributes:
        slurm_job_id: Slurm's number of the job.
        pod_uid: Kubernetes' uid of the pod.
        torchelastic_run_id: torchrun's run id.
        gpu_uuid: The GPU, or MIG instance, that the rank's process holds most memory on, by the driver or,
            where that shows none of its processes, by the rank itself.
    """

    slurm_job_id: str = ""
    pod_uid: str = ""
    torchelastic_run_id: str = ""
    gpu_uuid: str = ""


Owners = Callable[[RankIdentity], Owner]
"""Returns the owner of a rank."""


def from_identity(identity: RankIdentity) -> Owner:
    """Return the owner from the rank's own report."""
    return Owner(slurm_job_id=identity.slurm_job_id, pod_uid=identity.pod_uid)
