"""The evidence about a run's ranks, from which diagnosis finds causes, and how many samples it needs. Pure.

The observer samples runs at intervals of :data:`SAMPLE_S`. A cause is found in a window of samples, and
published once several windows have shown it. So a run is not called healthy before a window is full.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from torchperfd.model.loader_workers import LoaderFacts
from torchperfd.model.process import UNBOUND, CpuBinding
from torchperfd_daemon.diagnosis.waits import are_hidden, are_material, are_on_devices, longest_wait

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


def could_have_found(steps: int, step_seconds: float) -> bool:
    """Return whether any cause would have been published after so many steps of this mean length."""
    if step_seconds <= 0:
        return False
    warm = min(WARM_STEPS, math.ceil(WARM_S / step_seconds))
    samples = (steps - warm) * min(1.0, step_seconds / SAMPLE_S)
    return samples >= WINDOW_SAMPLES + MIN_FINDINGS


_WAIT: Final = "collective_wait"


@dataclass(frozen=True, slots=True)
class RankEvidence:
    """One rank over a window of training steps. Times are means per step in seconds; 0 or empty if unknown.

    Attributes:
        steps: How many steps the window has; 0 if unknown.
        stage: Its pipeline stage; None without pipeline parallelism.
        step_error_seconds: The standard error of ``step_seconds``, from the means of single samples.
        phase_seconds: Exclusive host time by phase, which sums to the step.
        device_phase_seconds: The same on its device, working or waiting; empty without device times.
        collected_seconds: Garbage collections.
        collects_apart: Whether ranks collect at different steps, and each delays all others; then
            ``collected_seconds`` are those of all ranks.
        queued_seconds: Runnable without a processor (run-queue delay).
        exchange_queued_seconds: The same for its threads that carry out collectives, summed.
        blocked_seconds: Kept from running by other threads of the process (:mod:`~.blocked`).
        blocked_by: The function and line in which these threads are most often, such as
            ``spin() at train.py:20``; empty before it was sampled.
        ran_seconds: CPU time of its training thread; 0 if unknown.
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
        sync_line: The line where most of that is, in words; empty if unknown.
        device_busy: The share of the step, 0 to 1, in which the device worked; None without a device.
        device_throttled: The share of the step in which power or heat slowed the device's clock.
        device_slowdown: The part of its clock that the device lost while throttled, 0 to 1.
        device_shared: The share of the device's busy time that other processes used.
        grows_by: Growth of its memory in bytes per second; 0 unless that is certain.
        grows_for_seconds: For how long the growth was observed.
        full_in_seconds: Time until memory is full at this rate; None without growth.
        before: The same rank before the run became slower; None if it did not.
        late_seconds: Own work above the peers' median, if that is beyond chance
            (:func:`~torchperfd_daemon.diagnosis.detect.find_stragglers`).
        late_phase: The phase that contains most of that.
        late_ever_since: Whether it was as late before the run became slower.
        loader: How it uses its loader; None if unknown.
        threads: How many threads an operation on the CPU may use; None if unknown.
        cpus: How many CPUs its process may use; None if unknown.
        binding: To how many CPUs it is bound, if these are fewer than its share.
        world_size: How many ranks its job has, on all nodes.
        other_threads_seconds: CPU time of the process's threads beyond those that compute with it. On a busy
            node a thread that takes the interpreter makes the training thread wait for a CPU each time that
            it gets the lock back, so that little of the wait is in ``blocked_seconds``.
        epoch_start_seconds: The wait for first batches of epochs beyond the usual wait, spread over steps.
        epoch_steps: Training steps of an epoch; 0 while no training pass over a loader has ended.
        workers_respawn: Whether each epoch starts the workers of its loader anew.
        step_grows_seconds: By how much each step is longer than the one before; 0 unless that is certain.
        periodic_seconds: What every n-th step takes longer than the others; 0 without such a period.
        step_grown_seconds: What that makes since the start of the run.
        step_grows_phase: The phase that contains most of that growth.
        switches: Debugging switches that are on, as they are written.
        graph_limit_reached: Whether torch.compile has given up on a function, which runs without it since.
        graph_limit_function: Name and line of that function, such as ``forward() at model.py:12``.
        script_collective_seconds: Collectives that the script starts itself, outside of the gradients'.
        script_collectives: Their number per step.
        script_collective_line: The line that starts most of them, such as ``all_reduce() at train.py:22``.
        called_collection_seconds: The part of ``collected_seconds`` in calls of ``gc.collect()``.
        collect_line: The line of most of these calls, such as ``train.py:31``.
        device_lag_seconds: How far the device is behind the host, by samples within steps: several steps if
            it bounds the loop, less than one if it waits for the host, or the host for it in each step. None
            without device times.
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
    epoch_steps: float = 0.0
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
    device_lag_seconds: float | None = None
    own_deviation_seconds: float | None = None

    @property
    def own_seconds(self) -> float:
        """The step less the wait for other ranks."""
        return self.step_seconds - self.wait_seconds

    @property
    def wait_seconds(self) -> float:
        """The wait for other ranks, of the host or of the device."""
        return longest_wait(self.phase_seconds, self.device_phase_seconds)


def wait_for_each_other(ranks: Sequence[RankEvidence]) -> bool:
    """Return whether waits show who is late."""
    return are_material([(rank.wait_seconds, rank.step_seconds) for rank in ranks])


def hide_waits(ranks: Sequence[RankEvidence]) -> bool:
    """Return whether ranks are on devices, and their waits for each other do not show who is late."""
    waits = [(rank.wait_seconds, rank.step_seconds) for rank in ranks]
    return are_hidden(waits, on_devices=all(rank.on_device for rank in ranks))


def do_devices_wait(ranks: Sequence[RankEvidence]) -> bool:
    """Return whether it is on their devices that ranks wait for each other, and not on the host."""
    return are_on_devices(
        [rank.phase_seconds.get(_WAIT, 0.0) for rank in ranks],
        [rank.device_phase_seconds.get(_WAIT, 0.0) if rank.device_phase_seconds else None for rank in ranks],
    )


FULL_SOON_S: Final = 3600.0
"""Growing memory is reported if it will be full within this time."""
FORESIGHT: Final = 150.0
"""Growth is extrapolated to at most this multiple of the time over which it was observed."""


def full_first(growing: Sequence[RankEvidence]) -> tuple[RankEvidence, float] | None:
    """Return the rank whose memory is full first, and in how many seconds; None if that is not soon."""
    times = [(each, each.full_in_seconds) for each in growing if each.full_in_seconds is not None]
    rank, seconds = min(times, key=lambda each: each[1], default=(None, 0.0))
    if rank is None or seconds > min(FULL_SOON_S, FORESIGHT * rank.grows_for_seconds):
        return None
    return rank, seconds
