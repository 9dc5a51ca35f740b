"""The metrics page: one registry over all sources, rendered in the format a scraper asks for.

Its series are capped: a node that has too many shows whole ranks or none of them, the oldest first.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

from torchperfd_daemon.collectors.base import Family
from torchperfd_daemon.store import Rank, Store

DEFAULT_SERIES: Final = 5000

_LEAST_OF_RANK: Final = 8
"""Series of a rank beside those of its phases, at the least."""
_MOST_OF_FAMILY: Final = 1000
"""No family of the node itself has so many."""

_Subject = tuple[str, str]
"""Run and rank; the rank is empty for what belongs to the run as a whole."""


class SeriesCap:
    """Keeps a page within a number of series.

    Series of the node itself are bounded by its hardware and stay; of a family that has more than
    ``most`` nevertheless, the rest is left out. Those of ranks stay for as many ranks as fit, in
    the order in which they came, so that a rank that was shown goes on being shown. Those of a whole run
    stay with any of its ranks.

    Args:
        oldest_first: Returns (run, rank) of every rank, in the order in which they came.
    """

    def __init__(self, most: int, oldest_first: Callable[[], Iterable[_Subject]]) -> None:
        self._most = most
        self._oldest_first = oldest_first
        self.left_out = 0
        """Series left out so far, summed over pages; a lower bound, since skipped ranks are estimated."""
        self._passed_over = 0

    def select(self, store: Store) -> list[Rank]:
        """Return the ranks of a store that a page may have room for, in the store's order.

        Making the series of thousands of ranks, only to leave them out, would take seconds.
        """
        room, chosen = self._most, set[Rank]()
        self._passed_over = 0
        for rank in in_order(store):
            least = _LEAST_OF_RANK + len(rank.totals.train.phases)
            if room >= 0:
                chosen.add(rank)
                room -= least
            else:
                self._passed_over += least
        return [rank for rank in store.ranks() if rank in chosen]

    def keep(self, metrics: list[Metric]) -> list[Metric]:
        """Return the metrics with what fits of their series; counts the others."""
        self.left_out += self._passed_over
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
            del metric.samples[max(self._most, _MOST_OF_FAMILY) :]
        self.left_out += total - sum(len(metric.samples) for metric in metrics)
        return [metric for metric in metrics if metric.samples]


def by_age(store: Store) -> list[_Subject]:
    """Return the ranks of a store as a page shows them; see :func:`in_order`."""
    return [(rank.identity.run, str(rank.identity.rank)) for rank in in_order(store)]


def in_order(store: Store) -> list[Rank]:
    """Return the ranks of a store: the oldest of each user, then the second of each, and so on.

    A user with hundreds of ranks does not keep those of others off the page.
    """
    seen: Counter[int | None] = Counter()
    places: list[tuple[int, float, Rank]] = []
    for rank in sorted(store.ranks(), key=lambda rank: rank.joined_at):
        places.append((seen[rank.process.uid], rank.joined_at, rank))
        seen[rank.process.uid] += 1
    return [rank for _, _, rank in sorted(places, key=lambda place: place[:2])]


def _subject(labels: dict[str, str]) -> _Subject | None:
    run = labels.get("run")
    return None if run is None else (run, labels.get("rank", ""))


PREFIX: Final = "torchperfd_"
CONTENT_TYPES: Final = ("text/plain", "application/openmetrics-text")


Source = Callable[[], Iterable[Family | Metric]]
"""Returns what is true now; must be quick and must not block."""


class MetricsPage:
    """Renders ``/metrics``.

    Args:
        sources: What the page shows, in its order.
        cap: Bounds the number of series; all are shown without one.
    """

    def __init__(self, sources: Sequence[Source], cap: SeriesCap | None = None) -> None:
        self._sources = sources
        self._cap = cap
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yield every family, as prometheus_client asks for them."""
        if self._cap is None:
            yield from self._metrics()
            return
        yield from self._cap.keep(list(self._metrics()))
        overflow = Family("label_overflow", "Series left out of pages to keep to the cap.", "counter")
        overflow.add(self._cap.left_out)
        yield _to_metric(overflow)

    def render(self, accept: str) -> tuple[bytes, str]:
        """Return the page and its content type, for the ``Accept`` header of a scraper."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def _metrics(self) -> Iterator[Metric]:
        for source in self._sources:
            for family in source():
                metric = family if isinstance(family, Metric) else _to_metric(family)
                if metric.samples:
                    yield metric


def _to_metric(family: Family) -> Metric:
    make = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    metric = make(PREFIX + family.name, family.help, labels=family.labels)
    for labels, value in family.samples:
        metric.add_metric(labels, value)
    return metric
