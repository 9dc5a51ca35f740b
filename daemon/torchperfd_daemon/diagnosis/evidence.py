"""The evidence about a run's ranks, from which diagnosis finds causes, and how many samples it needs. Pure.

The observer samples runs at intervals of :data:`SAMPLE_S`. A cause is found in a window of samples, and
published once several windows have shown it. So a run is not called healthy before a window is full.

With gloo the host waits for other ranks in the collective. With NCCL the host only launches it, which takes
microseconds, and the device waits.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from torchperfd.model.loader_facts import LoaderFacts
from torchperfd.model.process import UNBOUND, CpuBinding
from torchperfd_daemon.diagnosis.detect.straggler import WAITING, RankWork

SAMPLE_S: Final = 1.0
WARM_STEPS: Final = 20
"""The first steps differ from the others: this many, or those of :data:`WARM_S`, are left out."""
WARM_S: Final = 10.0
WINDOW_SAMPLES: Final = 10
"""The length of the evidence window, in samples that contain a step."""
MIN_WINDOW_SAMPLES: Final = 3
"""A shorter window shows nothing."""
MIN_FINDINGS: Final = 3
"""A verdict is published after this many consecutive samples, and withdrawn after as many without it."""
FULL_SOON_S: Final = 3600.0
"""Growing memory is reported if it will be full within this time."""
MATERIAL: Final = 0.01
"""Ranks wait for each other if one of them waits in collectives for this share of its step."""
_COMPUTES: Final = ("forward", "backward", "optimizer", "zero_grad")


def could_have_found(steps: int, step_seconds: float) -> bool:
    """Return whether any cause would have been published after so many steps of this mean length."""
    if step_seconds <= 0:
        return False
    warm = min(WARM_STEPS, math.ceil(WARM_S / step_seconds))
    samples = (steps - warm) * min(1.0, step_seconds / SAMPLE_S)
    return samples >= WINDOW_SAMPLES + MIN_FINDINGS


@dataclass(frozen=True, slots=True)
class RankEvidence:
    """One rank over a window of training steps. Times are means per step in seconds; 0 or empty if unknown.

    Attributes:
        phase_seconds: Exclusive host time by phase, which sums to the step.
        device_phase_seconds: The same on its device, working or waiting; empty without device times.
        collects_apart: Whether ranks collect at different steps, and each delays all others; then
            ``collected_seconds`` are those of all ranks.
        queued_seconds: Runnable without a processor (run-queue delay).
        exchange_queued_seconds: The same for its threads that carry out collectives, summed.
        blocked_seconds: Kept from running by other threads of the process (:func:`blocked_seconds`).
        throttled_seconds: Throttled by the quota of its control group.
        disk_seconds: Keeping storage busy or waiting for it, at most the wait for data.
        reclaim_seconds: Stalled for memory: reclaim, swapping, allocator retries.
        compiled_seconds: Compilations of graphs by torch.compile after the first steps.
        checkpoint_seconds: Checkpoints within and between steps, spread over steps.
        background_save_seconds: What steps lose beside checkpoints that are saved in the background.
        on_device: Whether its phases are timed on a device as well as on the host.
        hides_script_code: Whether the phase ``other`` may have more than the script's own code: waits for a
            device that is not timed, or phases that are not recorded.
        forward_unseen: Whether the model is trained, and its forward is in no phase but ``other``.
        sync_seconds: The host waits for its device in calls such as ``item``, by samples of its stack.
        sync_line: The line where most of that is, in words.
        device_busy: The share of the step, 0 to 1, in which the device worked; None without a device.
        device_throttled: The share of the step in which power or heat slowed the device's clock.
        device_slowdown: The part of its clock that the device lost while throttled, 0 to 1.
        device_shared: The share of the device's busy time that other processes used.
        grows_by: Growth of its memory in bytes per second; 0 unless that is certain.
        full_in_seconds: Time until memory is full at this rate; None without growth.
        before: The same rank before the run became slower; None if it did not.
        late_seconds: Own work above the peers' median, if that is beyond chance
            (:func:`~torchperfd_daemon.diagnosis.detect.find_stragglers`), most of it in ``late_phase``.
        late_ever_since: Whether it was as late before the run became slower.
        threads: How many threads an operation on the CPU may use; None if unknown.
        cpus: How many CPUs its process may use; None if unknown.
        binding: To how many CPUs it is bound, if these are fewer than its share.
        world_size: How many ranks its job has, on all nodes.
        stage: Its pipeline stage; None without pipeline parallelism.
        step_error_seconds: The standard error of ``step_seconds``, from the means of single samples.
        blocked_by: The function and line in which the threads that block it are most often, such as
            ``spin() at train.py:20``.
        other_threads_seconds: CPU time of the process's threads beyond those that compute with it. On a busy
            node a thread that takes the interpreter makes the training thread wait for a CPU each time that
            it gets the lock back, so that little of the wait is in ``blocked_seconds``.
        ran_seconds: CPU time of its training thread.
        epoch_start_seconds: The wait for first batches of epochs beyond the usual wait, spread over steps.
        workers_respawn: Whether each epoch starts the workers of its loader anew.
        step_grows_seconds: By how much each step is longer than the one before; 0 unless that is certain.
        periodic_seconds: What every n-th step takes longer than the others; 0 without such a period.
        step_grown_seconds: What the growth makes since the start of the run, most of it in
            ``step_grows_phase``.
        switches: Debugging switches that are on, as they are written.
        graph_limit_reached: Whether torch.compile has given up on ``graph_limit_function``, which runs
            without it since, such as ``forward() at model.py:12``.
        script_collective_seconds: Collectives that the script starts itself, outside of the gradients'.
        script_collectives: Their number per step.
        script_collective_line: The line that starts most of them, such as ``all_reduce() at train.py:22``.
        called_collection_seconds: The part of ``collected_seconds`` in calls of ``gc.collect()``, most of
            them in ``collect_line``, such as ``train.py:31``.
        own_deviation_seconds: The standard deviation, over single steps, of the device's time without waits
            for other ranks; None if it is not known.
    """

    rank: int
    node: str
    step_seconds: float
    phase_seconds: dict[str, float] = field(default_factory=dict)
    device_phase_seconds: dict[str, float] = field(default_factory=dict)
    collected_seconds: float = 0.0
    collects_apart: bool = False
    queued_seconds: float = 0.0
    exchange_queued_seconds: float = 0.0
    blocked_seconds: float = 0.0
    throttled_seconds: float = 0.0
    disk_seconds: float = 0.0
    reclaim_seconds: float = 0.0
    compiled_seconds: float = 0.0
    checkpoint_seconds: float = 0.0
    background_save_seconds: float = 0.0
    on_device: bool = False
    hides_script_code: bool = False
    forward_unseen: bool = False
    sync_seconds: float = 0.0
    sync_line: str = ""
    device_busy: float | None = None
    device_throttled: float = 0.0
    device_slowdown: float = 0.0
    device_shared: float = 0.0
    grows_by: float = 0.0
    grows_for_seconds: float = 0.0
    full_in_seconds: float | None = None
    before: "RankEvidence | None" = None
    late_seconds: float = 0.0
    late_phase: str = ""
    late_ever_since: bool = False
    window_seconds: float = 0.0
    loader: LoaderFacts | None = None
    threads: int | None = None
    cpus: float | None = None
    binding: CpuBinding = UNBOUND
    world_size: int = 1
    steps: int = 0
    stage: int | None = None
    step_error_seconds: float = 0.0
    blocked_by: str = ""
    other_threads_seconds: float = 0.0
    ran_seconds: float = 0.0
    epoch_start_seconds: float = 0.0
    workers_respawn: bool = False
    step_grows_seconds: float = 0.0
    periodic_seconds: float = 0.0
    step_grown_seconds: float = 0.0
    step_grows_phase: str = ""
    switches: tuple[str, ...] = ()
    graph_limit_reached: bool = False
    graph_limit_function: str = ""
    script_collective_seconds: float = 0.0
    script_collectives: float = 0.0
    script_collective_line: str = ""
    called_collection_seconds: float = 0.0
    collect_line: str = ""
    own_deviation_seconds: float | None = None

    @property
    def own_seconds(self) -> float:
        """The step less the wait for other ranks."""
        return self.step_seconds - self.wait_seconds

    @property
    def wait_seconds(self) -> float:
        """The wait for other ranks, of the host or of the device."""
        (wait,) = WAITING
        return max(self.phase_seconds.get(wait, 0.0), self.device_phase_seconds.get(wait, 0.0))

    @property
    def work_seconds(self) -> float:
        """How long its device works; 0 where that is unknown."""
        return self.step_seconds * self.device_busy if self.device_busy is not None else 0.0

    @property
    def idle_seconds(self) -> float:
        """How long its device neither works nor waits for other ranks; infinite where that is unknown.

        Without the driver's reading, the times of phases on the device contain its gaps.
        """
        if self.device_busy is None:
            return math.inf
        return self.step_seconds - self.work_seconds - self.wait_seconds


class TimedRank(Protocol):
    """A rank's mean step, and how much of it is a wait for other ranks, in seconds."""

    @property
    def step_seconds(self) -> float: ...

    @property
    def wait_seconds(self) -> float: ...


def wait_for_each_other(ranks: Sequence[TimedRank]) -> bool:
    """Return whether waits show who is late: some rank waits materially."""
    return len(ranks) > 1 and any(rank.wait_seconds >= MATERIAL * rank.step_seconds for rank in ranks)


def hide_waits(ranks: Sequence[RankEvidence]) -> bool:
    """Return whether ranks are on devices, and their waits for each other do not show who is late.

    Also where no wait is seen at all: those within compiled graphs never are.
    """
    return _are_hidden(ranks, on_devices=all(rank.on_device for rank in ranks))


def _are_hidden(ranks: Sequence[TimedRank], *, on_devices: bool) -> bool:
    return len(ranks) > 1 and on_devices and not wait_for_each_other(ranks)


def by_means(ranks: Sequence[RankEvidence]) -> bool:
    """Return whether steps are known by their means only, because some rank works on a device."""
    return any(rank.on_device or rank.device_busy is not None or rank.device_phase_seconds for rank in ranks)


def do_devices_wait(ranks: Sequence[RankEvidence]) -> bool:
    """Return whether it is on their devices that ranks wait for each other, and not on the host."""
    (wait,) = WAITING
    host = [rank.phase_seconds.get(wait, 0.0) for rank in ranks]
    device = [each.device_phase_seconds.get(wait, 0.0) for each in ranks if each.device_phase_seconds]
    return len(device) == len(host) and max(device, default=0.0) > max(host, default=0.0)


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


def compare(host: Sequence[RankWork], device: Sequence[RankWork | None]) -> Comparison:
    """Return the times by which ranks are to be compared.

    Args:
        device: The same ranks' phases on their devices; None without device times.
    """
    timed = [each for each in device if each is not None]
    on_devices = len(timed) == len(host)
    waits = [max((each.wait_seconds for each in works), default=0.0) for works in (host, timed)]
    on_device = on_devices and waits[1] > waits[0]
    works = timed if on_device else [*host]
    return Comparison(works, on_device, _are_hidden(works, on_devices=on_devices))


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

    A thread that holds Python's interpreter lock makes the training thread wait between any two calls, in no
    phase of its own: the kernel sees a thread that sleeps while another one of the same process runs.

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

    The arguments are those of :func:`blocked_seconds`.
    """
    return max(0.0, others_ran - (threads - 1) * ran) if ran > 0 and threads is not None else 0.0
