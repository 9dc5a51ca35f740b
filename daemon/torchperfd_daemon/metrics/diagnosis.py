"""What the observer holds of the runs, as metrics."""

from collections.abc import Iterator, Mapping
from typing import Protocol

from torchperfd_daemon.collectors.base import Family
from torchperfd_daemon.diagnosis import Cause, Verdict, diagnose
from torchperfd_daemon.metrics.training import recent_profile
from torchperfd_daemon.store import Store


class Observes(Protocol):
    """Who watches the runs; see ``Observer``."""

    def verdict(self, run: str) -> Verdict | None:
        """Return the present verdict on a run; None while there is none."""

    def lost_seconds(self) -> Mapping[str, Mapping[Cause, float]]:
        """Return what each cause has cost each run."""

    def stragglers(self) -> Mapping[str, Mapping[int, float]]:
        """Return the ranks that others wait for, with the seconds per step that they are late by."""


class DiagnosisMetrics:
    """A metrics source over the verdicts; of a run that is too young for one, what its steps so far say.

    Args:
        store: Where ranks and their steps are.
        observer: Watches them.
    """

    def __init__(self, store: Store, observer: Observes) -> None:
        self._store = store
        self._observer = observer

    def families(self) -> Iterator[Family]:
        """Return verdicts, what each cause has cost, and whom the others wait for."""
        verdicts = Family("train_verdict", "1 for the present verdict on a run.", "gauge", ("run", "cause"))
        for run, ranks in self._store.runs().items():
            verdict = self._observer.verdict(run) or diagnose(run, [recent_profile(rank) for rank in ranks])
            verdicts.add(1, run, verdict.cause.value)
        yield verdicts
        lost = Family(
            "train_lost_seconds",
            "Training time that a cause has cost the run, while it was told.",
            "counter",
            ("run", "cause"),
        )
        for run, causes in self._observer.lost_seconds().items():
            for cause, seconds in causes.items():
                lost.add(seconds, run, cause.value)
        yield lost
        late = Family(
            "train_straggler_excess_seconds",
            "Own work per step above the peers' median, of ranks that the others wait for.",
            "gauge",
            ("run", "rank"),
        )
        for run, stragglers in self._observer.stragglers().items():
            for rank, seconds in stragglers.items():
                late.add(seconds, run, str(rank))
        yield late
