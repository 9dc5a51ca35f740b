"""Metrics of the observer's verdicts."""

from collections.abc import Iterator

from torchperfd_daemon.collectors.base import Family
from torchperfd_daemon.metrics.cap import SeriesCap
from torchperfd_daemon.observer import Observer
from torchperfd_daemon.observer.mean_step import verdict_on_mean_step
from torchperfd_daemon.store import Store


class DiagnosisMetrics:
    """A metrics source over the verdicts; for a run without a verdict, over its steps so far.

    Args:
        cap: Says of which ranks there is room; of all without one.
    """

    def __init__(self, store: Store, observer: Observer, cap: SeriesCap | None = None) -> None:
        self._store = store
        self._cap = cap
        self._observer = observer

    def families(self) -> Iterator[Family]:
        """Return verdicts, the cost of each cause, and the rank that the others wait for."""
        runs = self._store.runs()
        if self._cap is not None:
            # A verdict is on all of a run's ranks, also where there is room for some of them only.
            shown = {rank.identity.run for rank in self._cap.select(self._store)}
            runs = {run: ranks for run, ranks in runs.items() if run in shown}
        verdicts = Family("train_verdict", "1 for the present verdict on a run.", "gauge", ("run", "cause"))
        for run, ranks in runs.items():
            verdict = self._observer.verdict(run) or verdict_on_mean_step(run, ranks)
            verdicts.add(1, run, verdict.cause.value)
        yield verdicts
        lost = Family(
            "train_lost_seconds",
            "Training time that a cause has cost the run, while it was the verdict.",
            "counter",
            ("run", "cause"),
        )
        for run, causes in self._observer.lost_seconds().items():
            for cause, seconds in causes.items() if run in runs else ():
                lost.add(seconds, run, cause.value)
        yield lost
        late = Family(
            "train_straggler_excess_seconds",
            "Own work per step above the peers' median, of ranks that the others wait for.",
            "gauge",
            ("run", "rank"),
        )
        for run, stragglers in self._observer.stragglers().items():
            for number, seconds in stragglers.items() if run in runs else ():
                late.add(seconds, run, str(number))
        yield late
