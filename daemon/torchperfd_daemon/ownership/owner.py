"""Whose a rank is, in the words of whatever started it."""

from collections.abc import Callable
from dataclasses import dataclass

from torchperfd_daemon.store import RankIdentity


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose a rank is; what is not known is empty.

    Attributes:
        slurm_job_id: Slurm's number of the job.
        pod_uid: Kubernetes' uid of the pod.
        torchelastic_run_id: What torchrun was told to call the run.
        gpu_uuid: The GPU, or MIG instance, that the rank's process holds most memory on.
    """

    slurm_job_id: str = ""
    pod_uid: str = ""
    torchelastic_run_id: str = ""
    gpu_uuid: str = ""


Owners = Callable[[RankIdentity], Owner]
"""Tells whose a rank is."""


def from_identity(identity: RankIdentity) -> Owner:
    """Return what the rank itself has told."""
    return Owner(slurm_job_id=identity.slurm_job_id, pod_uid=identity.pod_uid)
