"""Changes of a run's steps over time: periodic long steps, and throughput compared with the run's past."""

import statistics
from typing import Final

from torchperfd.durations import duration
from torchperfd_daemon.diagnosis import Cause, Verdict
from torchperfd_daemon.diagnosis.detect import Regression, RegressionDetector, SpikeDetector
from torchperfd_daemon.diagnosis.verdict import capture_command
from torchperfd_daemon.store import StepColumns

MIN_SHARE: Final = 0.05
"""Periodic long steps that cost a smaller share of all steps are not reported."""


class PeriodicityTracker:
    """Follows the steps of one rank, which represents its run. Memory of fixed size."""

    def __init__(self) -> None:
        self._spikes = SpikeDetector()
        self._throughput = RegressionDetector()
        self._step_seconds = 0.0

    def observe(self, columns: StepColumns) -> None:
        """Add the next steps, at least one."""
        for index, ns in enumerate(columns.duration_ns):
            phases = {name: column[index] / 1e9 for name, column in columns.phases.items()}
            self._spikes.observe(ns / 1e9, phases)
            self._throughput.observe(ns / 1e9)
        self._step_seconds = statistics.fmean(columns.duration_ns) / 1e9

    @property
    def period(self) -> int:
        """The number of steps from one long step to the next; 1 without a period."""
        found = self._spikes.find()
        return found.period if found else 1

    @property
    def seconds_per_step(self) -> float:
        """What periodic long steps take longer than the others, spread over all steps; 0 without a period."""
        found = self._spikes.find()
        return found.seconds_per_step if found else 0.0

    @property
    def past_step_seconds(self) -> float | None:
        """The step time before throughput decreased, even if slowly; None if it has not decreased."""
        found = self._regression()
        return 1 / found.past_per_second if found else None

    def remark(self, verdict: Verdict) -> str:
        """Return an addition to a verdict's evidence about periodic long steps; empty without any."""
        found = self._spikes.find()
        if found is None or found.seconds_per_step < MIN_SHARE * self._step_seconds:
            return ""
        phase = f", most of it in {found.phase}" if found.phase and found.phase != verdict.phase else ""
        return f"every {_ordinal(found.period)} step takes {duration(found.excess_seconds)} longer{phase}"

    def slower_than_ever(self, run: str) -> Verdict | None:
        """Return the verdict on a run whose throughput has decreased, even if slowly; None if it has not."""
        found = self._regression()
        if found is None:
            return None
        cost = 1 / found.now_per_second - 1 / found.past_per_second
        words = (
            f"{found.now_per_second:.3g} steps/s, {-found.change:.0%} fewer than the"
            f" {found.past_per_second:.3g} of the run's past"
        )
        return Verdict(Cause.UNKNOWN, run, "", None, "", words, cost, capture_command(run))

    def _regression(self) -> Regression | None:
        found = self._throughput.find()
        return found if found and found.regressed and found.now_per_second else None


def _ordinal(number: int) -> str:
    if number % 100 in (11, 12, 13):
        return f"{number}th"
    return f"{number}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th') }"
