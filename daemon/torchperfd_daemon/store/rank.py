"""One rank: its identity, state, totals and newest steps."""

from typing import Final

import numpy as np
import numpy.typing as npt

from torchperfd_daemon.loader_workers import SettledAdvice
from torchperfd_daemon.store.history import ArrivalHistory, History
from torchperfd_daemon.store.model import ProcessKey, RankIdentity, State, Totals
from torchperfd_daemon.store.percentiles import p50_and_p95
from torchperfd_daemon.store.seconds import SecondHistory

PRESENT_S: Final = 10.0
"""The window of a verdict, and so of every number about the present beside one."""

MIN_PRESENT_STEPS: Final = 12
"""As many steps as ranks can be compared by."""


class Rank:
    """One rank of one run on this node.

    Args:
        identity: Its identity, with the run's name on this node.
        now: Monotonic seconds.
        process: The key of its process; by default that of the identity, of an unknown user.
    """

    def __init__(self, identity: RankIdentity, now: float, process: ProcessKey | None = None) -> None:
        self.identity = identity
        self.process = process or ProcessKey.of(identity, None, 0)
        self.is_process_known = True
        """Whether the process id of the identity is verified; otherwise no data of that process is read."""
        self.gid: int | None = None
        """The group of its session, from the kernel; None if unknown."""
        self.state = State.STARTING
        self.framework = ""
        self.hooks = ""
        """The implementation of its client's hooks, ``native`` or ``reference``; empty if not reported."""
        self.failure = ""
        """The exception that has ended its script, in one line; empty if none has."""
        self.failed_unix_seconds = 0.0
        """When this daemon received that; 0 without one."""
        self.outcome = ""
        """What its run made of the promise of an earlier run, in one line; empty without one."""
        self.connected = True
        self.joined_at = now
        self.left_at: float | None = None
        self.totals = Totals()
        self.history = History()
        self.seconds = SecondHistory()
        self.arrivals = ArrivalHistory()
        self.last_step_unix_seconds = 0.0
        self.stalled_seconds = 0.0
        """The time without a step during a hang of its run; 0 without a hang."""
        self.blocked_seconds = 0.0
        """The part of a step in which other threads may have kept its training thread from running."""
        self.blocked_by = ""
        """Where these threads are most often, such as ``spin() at train.py:20``; empty if not sampled."""
        self.queued_seconds = 0.0
        """The part of a step in which its training thread was ready to run without a CPU."""
        self.loader_advice: SettledAdvice | None = None
        """What its run is advised on its loaders; None before that is settled."""
        self.stopped = False
        """Whether its process was found stopped, for example by SIGSTOP, during the present hang."""

    @property
    def next_step(self) -> int:
        """The number of the newest step held, plus one.

        From the steps themselves: with a live page open they come more often than the totals.
        """
        return self.history.next_step or self.totals.train.steps

    @property
    def steady_steps(self) -> int:
        """The number of newest steps for means: those held, without the run's first step.

        The first step includes all lazy initialisation. The client's report also leaves it out.
        """
        held = len(self.history)
        first_is_held = bool(self.totals.warmup.steps) and self.next_step <= held
        return held - 1 if first_is_held and held > 1 else held

    @property
    def present_steps(self) -> int:
        """The number of newest steps that every view of the present is about.

        Those that ended in the :data:`PRESENT_S` before the newest one, and at least
        :data:`MIN_PRESENT_STEPS`, out of the steady steps; all of these once the rank has left.
        """
        if not self.connected:
            return self.steady_steps
        return min(self.steady_steps, max(self.history.ended_within(PRESENT_S), MIN_PRESENT_STEPS))

    @property
    def has_ended(self) -> bool:
        """Whether it has finished or left, so that no further step of it comes."""
        return not self.connected or self.state is State.FINISHED

    def mean_step_seconds(self) -> float:
        """Return the mean duration of the present steps; 0 without any."""
        return self.history.mean_step_seconds(self.present_steps)

    def mean_phase_seconds(self) -> dict[str, float]:
        """Return each phase's mean exclusive time per present step."""
        return self.history.mean_phase_seconds(self.present_steps)

    def newest_step_seconds(self) -> npt.NDArray[np.float64]:
        """Return the durations of recent steps after the first, oldest first; shape (steps,)."""
        durations = self.history.newest_durations(self.steady_steps)
        return np.asarray(durations, dtype=np.int64) / 1e9

    def p95_step_seconds(self) -> float:
        """Return the 95th percentile of recent steps after the first; 0 without any."""
        durations = self.history.newest_durations(self.steady_steps)
        return float(p50_and_p95(durations)[1]) / 1e9 if durations else 0.0

    def mean_own_seconds(self) -> float:
        """Return the mean own work of the present steps: their duration less the wait for other ranks."""
        return self.mean_step_seconds() - self.mean_phase_seconds().get("collective_wait", 0.0)
