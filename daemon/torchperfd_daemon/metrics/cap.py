"""The cap on series: a node that has too many shows whole ranks or none of them, the oldest first."""

from collections.abc import Callable, Iterable
from typing import Final

from prometheus_client.core import Metric

from torchperfd_daemon.store import Store

DEFAULT_SERIES: Final = 5000

_Subject = tuple[str, str]
"""Run and rank; the rank is empty for what belongs to the run as a whole."""


class SeriesCap:
    """Keeps a page within a number of series.

    Series of the node itself are bounded by what it is made of and always stay. Those of ranks
    stay for as many ranks as fit, in the order in which they came, so that a rank that was shown
    goes on being shown. Those of a whole run stay with any of its ranks.

    Args:
        most: How many series there may be.
        oldest_first: Returns (run, rank) of every rank, in the order in which they came.
    """

    def __init__(self, most: int, oldest_first: Callable[[], Iterable[_Subject]]) -> None:
        self._most = most
        self._oldest_first = oldest_first
        self.left_out = 0
        """Series that were left out so far, summed over pages."""

    def keep(self, metrics: list[Metric]) -> list[Metric]:
        """Return the metrics with what fits of their series; counts the others."""
        total = sum(len(metric.samples) for metric in metrics)
        if total <= self._most:
            return metrics
        sizes: dict[_Subject | None, int] = {}
        for metric in metrics:
            for sample in metric.samples:
                subject = _subject(sample.labels)
                sizes[subject] = sizes.get(subject, 0) + 1
        room = self._most - sizes.get(None, 0)
        kept: set[_Subject | None] = {None}
        for run, rank in self._oldest_first():
            wanted = {(run, rank), (run, "")} - kept
            size = sum(sizes.get(subject, 0) for subject in wanted)
            if size > room:
                break
            room -= size
            kept |= wanted
        for metric in metrics:
            metric.samples = [sample for sample in metric.samples if _subject(sample.labels) in kept]
        self.left_out += total - sum(len(metric.samples) for metric in metrics)
        return [metric for metric in metrics if metric.samples]


def by_age(store: Store) -> list[_Subject]:
    """Return the ranks of a store, those that came first first."""
    ranks = sorted(store.ranks(), key=lambda rank: rank.joined_at)
    return [(rank.identity.run, str(rank.identity.rank)) for rank in ranks]


def _subject(labels: dict[str, str]) -> _Subject | None:
    run = labels.get("run")
    return None if run is None else (run, labels.get("rank", ""))
