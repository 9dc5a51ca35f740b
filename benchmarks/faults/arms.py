"""The arms of the suite: groups of jobs that answer one question each, and the bounds of their answers."""

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

from benchmarks.faults.catalog import (
    CPU,
    DEEP_MODEL,
    FAULTS,
    SAVES_A_LOT,
    SIMULATED,
    Fault,
    Plan,
)

from torchperfd_daemon.diagnosis.verdict import Cause

BUSY_PROCESSES: Final = 4
"""They share the machine with each job of the arm *busy*."""

_BOTH: Final = frozenset({CPU, SIMULATED})


def _measured(name: str, cause: Cause, seconds: float, **more: Any) -> Fault:
    """Return a fault whose cost is what ending it gives, in the mean step of the same job."""
    return replace(Fault(name, cause.value, seconds=seconds, times_itself=False), **more)


_COMPUTING: Final = (
    _measured("computing loader, all ranks", Cause.INPUT_BOUND, 0.03, ranks=2),
    _measured("computing script, all ranks", Cause.SCRIPT_CODE, 0.03, ranks=2),
)
"""Faults that use the CPU: on a busy node they cost more than their own time."""

CAUSES: Final = (
    _measured(
        "uneven work, rotating", Cause.UNEVEN_WORK, 0.03, whole_only=True, in_quick=True, devices=_BOTH
    ),
    _measured("uneven work, lognormal", Cause.UNEVEN_WORK, 0.03, whole_only=True, devices=_BOTH),
    _measured("uneven work, by length", Cause.UNEVEN_WORK, 0.03, whole_only=True, devices=_BOTH),
    _measured("interpreter held", Cause.INTERPRETER_LOCK, 0.0, culprits=1, work_seconds=0.004, in_quick=True),
    _measured("respawned workers", Cause.EPOCH_START, 0.03, from_start=True),
    _measured("one slow worker", Cause.SLOW_WORKER, 0.03, ranks=2, onset_steps=(20, 30)),
    _measured("pinned", Cause.CPU_AFFINITY, 0.0, ranks=1, from_start=True),
    _measured("more threads than CPUs", Cause.TOO_MANY_THREADS, 0.0, ranks=2, from_start=True),
    _measured("growing steps", Cause.GROWING_STEPS, 0.05, from_start=True, grows=True),
    _measured(
        "anomaly detection",
        Cause.DEBUG_SWITCH,
        0.0,
        ranks=2,
        only_model=DEEP_MODEL,
        from_start=True,
        in_quick=True,
    ),
    _measured(
        "distributed debug",
        Cause.DEBUG_SWITCH,
        0.0,
        replicated_only=True,
        from_start=True,
        env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"},
    ),
    *_COMPUTING,
)
"""Faults of the kind that owners of training scripts report."""

_OF_THE_MACHINE: Final = frozenset({"pinned", "more threads than CPUs"})
_OF_THE_HOST: Final = frozenset(
    {"slow loader, one rank", "slow loader, all ranks", "slow compute, one rank", "slow matmuls, one rank"}
    | {"garbage collection", "slow disk", "checkpoint stall", "recompiles"}
)

BUSY: Final = (
    *(fault for fault in FAULTS if fault.name in _OF_THE_HOST),
    *(fault for fault in CAUSES if fault.name not in _OF_THE_MACHINE),
)
"""What the owner of a script can fix, whatever else runs on the node."""


def _control(name: str, **more: Any) -> Fault:
    return replace(Fault(name, Cause.NONE.value, onset_steps=(25, 35)), **more)


CONTROLS: Final = (
    _control("healthy", in_quick=True, devices=_BOTH),
    _control("healthy, validation", devices=_BOTH, whole_only=True),
    _control("healthy, one rank", ranks=1),
    _control("healthy, two ranks", ranks=2),
    _control("healthy, only computes", ranks=1, pace_seconds=0.0),
    _control("healthy, small steps", ranks=1, pace_seconds=0.002, onset_steps=(400, 600)),
    _control("healthy, long steps", pace_seconds=0.4),
    _control("healthy, accumulation", replicated_only=True),
    _control("healthy, workers that keep up", ranks=2, in_quick=True),
    _control("healthy, epochs"),
    _control("healthy, quick checkpoints"),
    _control("healthy, equal lengths", devices=_BOTH, whole_only=True),
    _control("healthy, idle thread"),
    _control("healthy, seldom metrics"),
)
"""Loops of many shapes in which nothing is wrong."""

NAMED: Final = {fault.name: fault for fault in (*CONTROLS, *CAUSES, *FAULTS, SAVES_A_LOT)}
"""All faults by name."""


@dataclass(frozen=True, slots=True)
class Arm:
    """A part of the suite.

    Attributes:
        faults: What its jobs have.
        question: What it answers, in words.
        least_right: The least share of its jobs with a fault whose cause is the first verdict.
        cost_within: By how much a cost may differ from the true one, as a part of it.
        hogs: Busy processes beside each job.
    """

    faults: tuple[Fault, ...]
    question: str
    least_right: float
    cost_within: float
    hogs: int = 0

    def on(self, plan: Plan) -> Plan:
        """Return a job as this arm runs it: with half of the healthy steps where busy processes slow them."""
        return replace(plan, hogs=self.hogs, onset=plan.onset // 2) if self.hogs else plan


USUAL: Final = "faults"
ARMS: Final = {
    USUAL: Arm(FAULTS, "the first catalog of faults", 0.95, 0.10),
    "causes": Arm(CAUSES, "is the cause right, and what removing it gives?", 0.95, 0.15),
    "busy": Arm(
        BUSY,
        "does the cause that the owner can fix come first on a busy node, with its gain?",
        0.90,
        0.25,
        BUSY_PROCESSES,
    ),
    "controls": Arm(CONTROLS, "is any healthy job blamed?", 1.0, 0.0),
}


def unable(faults: Iterable[Fault]) -> dict[str, str]:
    """Return which faults need more CPUs than this process may use, and why."""
    cpus = len(os.sched_getaffinity(0))
    return {
        fault.name: f"{cpus} CPU allowed, at least 2 needed"
        for fault in faults
        if fault.name in _OF_THE_MACHINE and cpus < 2
    }
