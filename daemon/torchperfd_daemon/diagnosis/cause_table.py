"""The table of causes: for each, the evidence that it needs, the time that removing it takes away, its words.

Rows come in the order in which they take time from a step: what is measured directly precedes what is left of
a phase, and that precedes what only shows by comparing ranks. The cost of a cause does not depend on the
order: it is the measured step less the replayed step without the cause.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from torchperfd_daemon.diagnosis.detect.straggler import WAITING
from torchperfd_daemon.diagnosis.edits import DATA
from torchperfd_daemon.diagnosis.evidence import RankEvidence
from torchperfd_daemon.diagnosis.verdict import Cause

MIN_CAUSE_SHARE: Final = 0.05
"""A cause that costs a smaller share of the step is not reported."""
_INPUT_SHARE: Final = 0.2
"""Waiting for data is a cause from this share of the step on..."""
_SCRIPT_SHARE: Final = 0.2
"""...and so is the script's own code between the phases."""
UNEVEN_SHARE: Final = 0.1
"""Work that differs from step to step is a cause from this share of the step on: all work does a little."""
MIN_COLLECTIVES: Final = 2
"""Collectives of the script's own are a cause from so many in a step on..."""
COLLECTIVES_SHARE: Final = 0.1
"""...and from this share of the step on."""
SMALL_BATCH: Final = 8
"""Batches of at most so many samples may be too small..."""
SMALL_BATCH_SHARE: Final = 0.2
"""...if one of twice the size would save this share of the step."""
CROWDED_SHARE: Final = 0.1
"""A wait for a CPU since the start is a cause from here on, if ranks have more threads than CPUs."""
EXPLAINED: Final = 0.5
"""A slowdown of which a smaller share has a cause gets the cause ``UNKNOWN``."""
MOST_OF: Final = 0.75
"""A cause that explains this share of a rank's lateness gets all of it."""

_OWN_WORK: Final = 0.2
"""A wait for processors that has grown by at most five times as much as a rank's own work came with that."""

_HELD_SHARE: Final = 0.15
"""Threads that run for a smaller share of the step do not keep the training thread in the queue."""

Left = Callable[[str], float]
"""Returns what earlier causes have left of a phase of the same rank, in seconds per step."""
Measure = Callable[[RankEvidence, Left], float]


@dataclass(frozen=True, slots=True)
class Row:
    """One cause that is measured on each rank.

    Attributes:
        words: What its time is, after "40 ms of each 100 ms step".
        measure: The rank's loss in seconds per step.
        phase: The phase that contains it; empty for all own work.
        ever_since: The least share of the step for a loss that all ranks have since the start; every run has
            smaller ones.
        peaks: Whether it is in some steps only, and not in all alike.
        syncs: Whether it is a wait of the host for its device.
        of_device: Whether it is work of the device; other causes delay the host, which a device may hide.
        beside_steps: Whether ranks wait for it at another place than their collectives.
        computes: Whether it computes, so that a wait for a processor is partly in its time.
        in_part: Whether more comes with it than is measured: if it explains most of a rank's lateness, all.
        all_threads: Whether it slows the threads that carry out collectives, too.
        of_machine: Whether it is the state of the machine, which the owner of the job may not be able to
            change; where all ranks have it since the start, it is no part of the other causes.
        lasts: Whether it is reported beside a slowdown that it has not come with.
        alike_from: A rank is named unless the median of the others reaches this share of its loss.
    """

    cause: Cause
    words: str
    measure: Measure
    phase: str = ""
    ever_since: float = MIN_CAUSE_SHARE
    peaks: bool = False
    syncs: bool = False
    of_device: bool = False
    beside_steps: bool = False
    computes: bool = False
    in_part: bool = False
    all_threads: bool = False
    of_machine: bool = False
    lasts: bool = False
    alike_from: float = 0.5


def _stored(rank: RankEvidence, left: Left) -> float:
    """Return the part of the wait for data that storage causes.

    If storage causes most of it, all of it counts: the loader's other work, such as copying, belongs to the
    same reads.
    """
    waited = left(DATA)
    return waited if rank.disk_seconds > EXPLAINED * waited else rank.disk_seconds


def _locked_out(rank: RankEvidence, _: Left) -> float:
    """Return for how long another thread of the process keeps the training thread from running.

    Where processors are scarce, the training thread queues for one again after each time that the lock is
    handed over. Collectives have threads of their own, which need no lock: a rank among others is judged only
    by the time for which its thread stands still.
    """
    threads = rank.other_threads_seconds
    is_held = rank.world_size == 1 and threads >= max(rank.ran_seconds, _HELD_SHARE * rank.step_seconds) > 0
    return rank.blocked_seconds + (rank.queued_seconds if is_held and rank.ran_seconds else 0.0)


def _unserved(rank: RankEvidence, _: Left) -> float:
    """Return the wait for a processor, which for the threads of collectives counts beyond the past's only.

    Several of these wait one after the other and beside the step's own work, in every run to some degree. A
    rank with more work than in the past waits more often. That part of the growth is not a lack of
    processors.
    """
    queued, past = rank.queued_seconds - rank.throttled_seconds, rank.before
    if past is None:
        return queued
    does, did = rank.own_seconds - rank.queued_seconds, past.own_seconds - past.queued_seconds
    more = max(1.0, does / did) if did > 0 else 1.0
    if does - did >= _OWN_WORK * (rank.queued_seconds - past.queued_seconds) > 0:
        # It computes so much more that processors are lacking for that: the wait comes back with the work.
        return past.queued_seconds - past.throttled_seconds
    grown = rank.exchange_queued_seconds - more * past.exchange_queued_seconds
    return queued - (more - 1) * past.queued_seconds + max(0.0, grown)


CONTENTION: Final = Row(
    Cause.CPU_CONTENTION,
    "ready to run without a processor",
    _unserved,
    ever_since=0.3,
    all_threads=True,
    of_machine=True,
    # Ranks that use more processors leave fewer to the others, which then wait as well.
    alike_from=0.7,
)
INPUT: Final = Row(
    Cause.INPUT_BOUND,
    "waiting for data",
    lambda _, left: left(DATA),
    phase=DATA,
    ever_since=_INPUT_SHARE,
    lasts=True,
)

BACKGROUND: Final = Row(
    Cause.CHECKPOINT,
    "lost beside checkpoints that are saved in the background",
    lambda rank, _: rank.checkpoint_seconds + rank.background_save_seconds,
    beside_steps=True,
)
"""In place of the row on checkpoints, where most of their time is beside the steps."""

MEASURED: Final[Sequence[Row]] = (
    Row(
        Cause.CGROUP_THROTTLING,
        "held back by the control group's CPU quota",
        lambda rank, _: rank.throttled_seconds,
        all_threads=True,
    ),
    Row(
        Cause.GARBAGE_COLLECTION,
        "in Python's garbage collector",
        lambda rank, _: rank.collected_seconds,
        peaks=True,
        computes=True,
    ),
    Row(
        Cause.RECOMPILATION,
        "compiling graphs again",
        lambda rank, _: rank.compiled_seconds,
        peaks=True,
        computes=True,
        in_part=True,
    ),
    Row(
        Cause.CHECKPOINT,
        "writing checkpoints",
        lambda rank, _: rank.checkpoint_seconds + rank.background_save_seconds,
        phase="checkpoint",
        peaks=True,
        beside_steps=True,
    ),
    Row(
        Cause.SLOW_IO,
        "stalled for disk or network storage",
        _stored,
        phase=DATA,
        ever_since=_INPUT_SHARE,
        lasts=True,
    ),
    Row(Cause.MEMORY_PRESSURE, "stalled for memory", lambda rank, _: rank.reclaim_seconds),
    Row(
        Cause.INTERPRETER_LOCK,
        "standing still while another thread of the process holds Python's interpreter",
        _locked_out,
        ever_since=0.2,
        # Only what falls into phases that compute is measured, and collectives need the lock as well.
        in_part=True,
        all_threads=True,
        lasts=True,
    ),
    CONTENTION,
    Row(
        Cause.GPU_THROTTLING,
        "lost to a device clock lowered by power or heat",
        lambda rank, _: rank.work_seconds * rank.device_throttled * rank.device_slowdown,
        of_device=True,
        in_part=True,
    ),
    Row(
        Cause.GPU_SHARED,
        "lost to other processes on the device",
        lambda rank, _: rank.work_seconds * rank.device_shared,
        of_device=True,
    ),
    INPUT,
)
"""Causes whose time is measured, in the order in which they take it: a throttled rank also waits for the
processor, and so does a rank with more work, such as garbage collections."""

SYNCHRONISATION: Final = Row(
    Cause.SYNCHRONISATION,
    "with the device idle after the host has waited for it",
    lambda rank, _: rank.sync_seconds if rank.device_busy is not None else 0.0,
    ever_since=0.1,
    syncs=True,
    in_part=True,
)
HOST_BOUND: Final = Row(
    Cause.HOST_BOUND,
    "with the device idle while the host works",
    lambda rank, left: _host_beyond_device(rank, left),
    ever_since=0.3,
)
SCRIPT_WORDS: Final[Mapping[str, str]] = {
    "other": "the script's own code between the phases",
    "loss": "the script's own code between the forward and the backward",
}
MIN_LOSS_SECONDS: Final = 0.003
"""A shorter ``loss`` is what it is called: a small model's loss may be a large part of a short step."""
_IDLE_DEVICE: Final = 0.5
_NOT_HOST: Final = WAITING | {DATA}


def script_code_phase(ranks: Sequence[RankEvidence]) -> str:
    """Return the phase in which most ranks spend most of the script's own code: ``other`` or ``loss``.

    The time of ``loss`` counts from :data:`MIN_LOSS_SECONDS` on.
    """

    def share(phase: str, least: float) -> float:
        spent = ((rank.phase_seconds.get(phase, 0.0), rank.step_seconds) for rank in ranks)
        return statistics.median_low(seconds / step if seconds >= least else 0.0 for seconds, step in spent)

    return "loss" if share("loss", MIN_LOSS_SECONDS) > share("other", 0.0) else "other"


def script_code(phase: str) -> Row:
    """Return the row on the script's own code in a phase, ``other`` or ``loss``."""
    return Row(
        Cause.SCRIPT_CODE,
        f"in {SCRIPT_WORDS[phase]}",
        lambda _, left: left(phase),
        phase=phase,
        ever_since=_SCRIPT_SHARE,
        lasts=True,
    )


def _host_beyond_device(rank: RankEvidence, left: Left) -> float:
    """Return for how long a rank's device idles during unclaimed work of the host."""
    if rank.device_busy is None or rank.device_busy >= _IDLE_DEVICE:
        return 0.0
    working = sum(left(name) for name in rank.phase_seconds if name not in _NOT_HOST)
    return working - rank.work_seconds
