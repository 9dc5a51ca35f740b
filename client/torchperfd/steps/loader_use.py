"""How a training process uses its DataLoader: what advice on worker processes depends on."""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from torchperfd.input_stages import InputStages


@dataclass(frozen=True, slots=True)
class LoaderUse:
    """The loader that the newest sampled draw was from, and means of the latest samples; None where unknown.

    Attributes:
        workers: Its worker processes.
        cpus: CPUs that the process may use: affinity, control group's quota, and its share of the node's.
        draw_cpu: The share of a draw in this process that is CPU time, 0 to 1; without the time in which
            the thread was ready to run and had no CPU.
        rest_cpus: CPUs that the process uses on average between draws.
        batch_tensors: Tensors in a batch.
        batch_bytes: Their bytes.
        batch_size: Samples that the loader puts into a batch; 0 where it does not choose them itself.
        receive_seconds: What a draw takes when the workers have a batch ready.
        worker_cpu_seconds: CPU time of the workers' main threads for each batch.
        worker_queued: The share of the workers' time in which they were ready to run without a CPU.
        indexable: The dataset is a plain ``TensorDataset``, collated and sampled in torch's usual ways.
        shuffles: Its sampler is torch's ``RandomSampler``.
        batches_per_step: Draws in a training step; 0 before the first.
        queued: The share of the time in which the training thread was ready to run that it had no CPU.
        stages: What the stages of making a batch take.
    """

    workers: int = 0
    cpus: float = 0.0
    draw_cpu: float | None = None
    rest_cpus: float | None = None
    batch_tensors: int = 0
    batch_bytes: int = 0
    batch_size: int = 0
    receive_seconds: float | None = None
    worker_cpu_seconds: float | None = None
    worker_queued: float | None = None
    indexable: bool = False
    shuffles: bool = False
    batches_per_step: float = 0.0
    queued: float | None = None
    stages: InputStages | None = None


def available_cpus(root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc/self/cgroup")) -> float:
    """Return how many CPUs this process may use: by affinity, by quota, and beside the node's other ranks."""
    try:
        bound = len(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        bound = os.cpu_count() or 1
    quota = _quota(root, proc)
    cpus = float(bound) if quota is None else min(float(bound), quota)
    # Ranks that are each bound to CPUs of their own share none.
    if cpus < bound or bound == os.cpu_count():
        with contextlib.suppress(ValueError):
            cpus /= max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return cpus


def _quota(root: Path, proc: Path) -> float | None:
    """Return the least quota of this process's control group and of those around it; None without one."""
    try:
        groups = [line.split(":", 2) for line in proc.read_text().splitlines()]
    except OSError:
        return None
    found = []
    for _, controllers, path in (each for each in groups if len(each) == 3):
        if not controllers:
            top = root
        elif "cpu" in controllers.split(","):
            top = root / "cpu"
        else:
            continue
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            found.append(_quota_of(folder))
            if folder == top:
                break
    return min((each for each in found if each), default=None)


def _quota_of(folder: Path) -> float | None:
    try:
        if (folder / "cpu.max").exists():
            most, period = (folder / "cpu.max").read_text().split()
        else:
            most = (folder / "cpu.cfs_quota_us").read_text()
            period = (folder / "cpu.cfs_period_us").read_text()
        return int(most) / int(period) if int(most) > 0 and int(period) > 0 else None
    except (OSError, ValueError):
        return None  # "max" is no number
