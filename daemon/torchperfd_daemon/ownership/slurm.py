"""Slurm: the job in a process's control group, and the GPUs in its environment."""

import contextlib
import re
from collections.abc import Mapping
from typing import Final

from torchperfd_daemon.collectors.procfs import parse_cpu_list

# /slurm/uid_1000/job_77/step_0 with cgroups of version 1, which may name the node after "slurm";
# /system.slice/slurmstepd.scope/job_77/step_0/user/task_0 with those of version 2.
_JOB: Final = re.compile(r"/[^/\n]*slurm[^/\n]*(?:/uid_\d+)?/job_(\d+)(?:/|$)", re.MULTILINE)


def job_of_cgroup(text: str) -> str:
    """Return the number of the job in the text of ``/proc/<pid>/cgroup``; empty without one."""
    found = _JOB.search(text)
    return found[1] if found else ""


def gpus_of_environment(environment: Mapping[str, str]) -> frozenset[str]:
    """Return the indices of the node's GPUs that Slurm gave to a task; empty if unknown.

    The step's variable comes first, then the job's. Both count all GPUs of the node, while
    ``CUDA_VISIBLE_DEVICES`` may count only the job's own.
    """
    text = environment.get("SLURM_STEP_GPUS") or environment.get("SLURM_JOB_GPUS", "")
    with contextlib.suppress(ValueError):
        return frozenset(map(str, parse_cpu_list(text)))
    return frozenset()
