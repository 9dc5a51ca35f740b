"""Where ranks wait for each other, for which stage, and how long a training thread is blocked. Pure.

With gloo the host waits in the collective. With NCCL the host only launches it, which takes microseconds, and
the device waits.

A thread of the script that holds Python's interpreter lock makes the training thread wait for it, between any
two calls. That wait is in no phase of its own: the kernel sees a thread that sleeps, while another one of the
same process runs.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from torchperfd.model.formatting import duration
from torchperfd_daemon.diagnosis.detect.straggler import WAITING, RankWork

_MATERIAL: Final = 0.01
"""Ranks wait for each other if one of them waits in collectives for this share of its step."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The times by which a run's ranks are to be compared.

    Attributes:
        works: Each rank's phases, on the host or on its device.
        on_device: Whether they are times on the devices, because ranks wait for each other there.
        hidden: Whether ranks are on devices, and their waits for each other do not show who is late.
    """

    works: list[RankWork]
    on_device: bool
    hidden: bool


def are_material(waits: Sequence[tuple[float, float]]) -> bool:
    """Return whether the waits of several ranks show who is late: some rank waits materially.

    Args:
        waits: Of each rank, the wait and the step, in seconds.
    """
    return len(waits) > 1 and any(wait >= _MATERIAL * step for wait, step in waits)


def are_on_devices(host: Sequence[float], device: Sequence[float | None]) -> bool:
    """Return whether it is on their devices that ranks wait for each other, and not on the host.

    Args:
        host: Each rank's wait on the host, in seconds per step.
        device: The same on its device; None without device times.
    """
    known = [wait for wait in device if wait is not None]
    return len(known) == len(host) and max(known, default=0.0) > max(host, default=0.0)


def are_hidden(waits: Sequence[tuple[float, float]], *, on_devices: bool) -> bool:
    """Return whether ranks are on devices, and their waits for each other do not show who is late.

    Also where no wait is seen at all: those within compiled graphs never are.

    Args:
        waits: Of each rank, the wait and the step, in seconds.
        on_devices: Whether all ranks are on devices.
    """
    return len(waits) > 1 and on_devices and not are_material(waits)


def compare(host: Sequence[RankWork], device: Sequence[RankWork | None]) -> Comparison:
    """Return the times by which ranks are to be compared.

    Args:
        host: Each rank's phases on the host.
        device: The same ranks' phases on their devices; None without device times.
    """
    timed = [each for each in device if each is not None]
    waits = [mean_wait(each) for each in host], [None if each is None else mean_wait(each) for each in device]
    on_device = are_on_devices(*waits)
    works = timed if on_device else [*host]
    steps = [(mean_wait(each), mean_step(each)) for each in works]
    return Comparison(works, on_device, are_hidden(steps, on_devices=len(timed) == len(host)))


def longest_wait(host: Mapping[str, float], device: Mapping[str, float]) -> float:
    """Return a rank's wait for others by its phases, of the host or of the device.

    With NCCL only the device waits there.
    """
    return max(sum(phases.get(name, 0.0) for name in WAITING) for phases in (host, device))


def mean_wait(work: RankWork) -> float:
    """Return a rank's wait for others, in seconds per step."""
    return _mean(work, waiting=True)


def mean_own(work: RankWork) -> float:
    """Return a rank's own work, which is its step without that wait, in seconds."""
    return _mean(work, waiting=False)


def mean_step(work: RankWork) -> float:
    """Return a rank's step in seconds."""
    return mean_wait(work) + mean_own(work)


def _mean(work: RankWork, *, waiting: bool) -> float:
    columns = [column for name, column in work.phase_seconds.items() if (name in WAITING) is waiting]
    return float(sum(column.mean() for column in columns if len(column)))


@dataclass(frozen=True, slots=True)
class Imbalance:
    """The longest stage of a pipeline, and what it costs.

    Attributes:
        stages: How many stages were seen.
        own_seconds: The own work of the longest stage per step: the median of its ranks; of two, the faster.
        mean_seconds: The mean of all stages.
        wait_seconds: The median wait of all ranks per step.
    """

    stage: int
    stages: int
    own_seconds: float
    mean_seconds: float
    wait_seconds: float

    @property
    def cost_seconds(self) -> float:
        """What equal stages would save per step."""
        return self.own_seconds - self.mean_seconds

    def words(self, step_seconds: float) -> str:
        """Return the evidence in words."""
        return (
            f"stage {self.stage} works {duration(self.own_seconds)} of each {duration(step_seconds)} step,"
            f" the {self.stages} stages {duration(self.mean_seconds)} on average; ranks wait for"
            f" {duration(self.wait_seconds)} of it; move layers from stage {self.stage} to others"
        )


def find_imbalance(ranks: Iterable[tuple[int | None, float, float]]) -> Imbalance | None:
    """Return the longest stage of a pipeline; None for fewer than two stages.

    The step takes as long as the longest stage needs. With equal stages it would take their mean.

    Args:
        ranks: Of each rank, its stage, own work and wait for others, in seconds per step; ranks without a
            stage are left out.
    """
    placed = [(stage, own, wait) for stage, own, wait in ranks if stage is not None]
    stages = {
        # Of an even number the lower one: a slow rank makes its stage no longer, not even of two.
        stage: statistics.median_low(own for there, own, _ in placed if there == stage)
        for stage in dict.fromkeys(stage for stage, _, _ in placed)
    }
    if len(stages) < 2:
        return None
    longest = max(stages, key=lambda stage: stages[stage])
    return Imbalance(
        longest,
        len(stages),
        stages[longest],
        statistics.fmean(stages.values()),
        statistics.median(wait for _, _, wait in placed),
    )


_COMPUTES: Final = ("forward", "backward", "optimizer", "zero_grad")


def blocked_seconds(
    phases: Mapping[str, float],
    *,
    ran: float,
    queued: float,
    others_ran: float,
    threads: int | None,
    on_device: bool,
) -> float:
    """Return for how long another thread of the process may have kept the training thread from running.

    At least for so long: what the thread ran in other phases counts as if it had been in these. At most for
    as long as other threads ran beyond those that compute with it: a model that sleeps, or waits for another
    process, is not blocked by a thread.

    Args:
        phases: Exclusive host time per step, in seconds.
        ran: CPU time of the training thread per step, in seconds; 0 if unknown.
        queued: Its wait for a CPU.
        others_ran: CPU time of all other threads of the process.
        threads: How many threads an operation may use; None if unknown.
        on_device: Whether its phases are timed on a device, for which the host waits in any phase.
    """
    if on_device or ran <= 0 or threads is None:
        return 0.0
    computing = sum(phases.get(name, 0.0) for name in _COMPUTES)
    strangers_ran = strangers_seconds(ran=ran, others_ran=others_ran, threads=threads)
    return max(0.0, min(computing - ran - queued, strangers_ran))


def strangers_seconds(*, ran: float, others_ran: float, threads: int | None) -> float:
    """Return the CPU time of a process's threads beyond those that compute with the training thread.

    Args:
        ran: CPU time of the training thread per step, in seconds; 0 if unknown.
        others_ran: CPU time of all other threads of the process.
        threads: How many threads an operation may use; None if unknown.
    """
    return max(0.0, others_ran - (threads - 1) * ran) if ran > 0 and threads is not None else 0.0
