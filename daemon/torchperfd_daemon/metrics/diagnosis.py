"""Metrics of the observer's verdicts."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final

from torchperfd.step_account import Part
from torchperfd_daemon.collectors.base import Family
from torchperfd_daemon.metrics.cap import SeriesCap
from torchperfd_daemon.observer import Observer
from torchperfd_daemon.observer.mean_step import verdict_on_mean_step
from torchperfd_daemon.store import Store

_PART_LABELS: Final = ("run", "part", "name")
_MAX_NAMES: Final = 32
"""Of a run's parts, the largest have their names; the names of phases are the script's own."""


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
        """Return verdicts, the parts of the step, what causes cost, and the ranks that others wait for."""
        runs = self._store.runs()
        if self._cap is not None:
            # A verdict is on all of a run's ranks, also where there is room for some of them only.
            shown = {rank.identity.run for rank in self._cap.select(self._store)}
            runs = {run: ranks for run, ranks in runs.items() if run in shown}
        verdicts = Family("train_verdict", "1 for the present verdict on a run.", "gauge", ("run", "cause"))
        parts = Family(
            "train_step_part_seconds",
            "Mean time per step of each part of the step; the parts of a run sum to its step.",
            "gauge",
            _PART_LABELS,
        )
        hidden = Family(
            "train_step_hidden_seconds",
            "Mean time per step beside the step, which costs nothing.",
            "gauge",
            _PART_LABELS,
        )
        for run, ranks in runs.items():
            verdict = self._observer.verdict(run) or verdict_on_mean_step(run, ranks)
            verdicts.add(1, run, verdict.cause.value)
            if verdict.account is not None:
                _add_parts(parts, run, verdict.account.parts)
                _add_parts(hidden, run, verdict.account.hidden)
        yield from (verdicts, parts, hidden)
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


def _add_parts(family: Family, run: str, parts: Sequence[Part]) -> None:
    """Add a series for each kind and name; the names of small parts are left out, not their time."""
    summed: defaultdict[tuple[str, str], float] = defaultdict(float)
    largest = sorted(parts, key=lambda part: -part.seconds)
    for position, part in enumerate(largest):
        summed[part.kind.value, part.name if position < _MAX_NAMES else ""] += part.seconds
    for (kind, name), seconds in summed.items():
        family.add(seconds, run, kind, name)
