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
    """Return the number of the job that ``/proc/<pid>/cgroup`` tells of, empty when it tells of none."""
    found = _JOB.search(text)
    return found[1] if found else ""


def gpus_of_environment(environment: Mapping[str, str]) -> frozenset[str]:
    """Return the node's GPUs that were given to a task, by index; empty when it was not told.

    Of the step's, else of the whole job's: both count all GPUs of the node, where
    ``CUDA_VISIBLE_DEVICES`` may count the job's own only.
    """
    text = environment.get("SLURM_STEP_GPUS") or environment.get("SLURM_JOB_GPUS", "")
    with contextlib.suppress(ValueError):
        return frozenset(map(str, parse_cpu_list(text)))
    return frozenset()
