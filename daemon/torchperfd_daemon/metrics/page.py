"""The metrics page: one registry over all sources, and the families on the daemon's own health and work.

It is rendered in the format a scraper asks for.
"""

import platform
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from torchperfd._version import __revision__, __version__
from torchperfd_daemon.background import WorkerHealth
from torchperfd_daemon.captures.analyst import AnalysisCounts
from torchperfd_daemon.captures.coordinator import CaptureCounts
from torchperfd_daemon.captures.retention_worker import RetentionCounts
from torchperfd_daemon.captures.uploader import UploadCounts
from torchperfd_daemon.collectors.base import Family, Kind, Sampler
from torchperfd_daemon.goodput.totals import Bucket
from torchperfd_daemon.lake.uploader import LakeCounts
from torchperfd_daemon.metrics.exposition import PREFIX, render
from torchperfd_daemon.store.store import Rank, Store
from torchperfd_daemon.triggers.rules import TriggerCounts

DEFAULT_SERIES: Final = 5000

_MIN_OF_RANK: Final = 6
"""Series of a rank besides those of its phases, at the least, on a page of what is essential."""
_MAX_OF_FAMILY: Final = 1000
"""No family of the node itself has so many."""

RANK_LABELS: Final = ("run", "rank")
"""The first labels of each series of a rank."""

ESSENTIAL_FAMILIES: Final = frozenset(
    {
        *("train_steps", "train_step_seconds", "train_phase_seconds", "train_samples", "train_tokens"),
        *("train_dataloader_ready_batches", "train_last_step_timestamp_seconds", "train_world_size"),
        *("train_state", "train_rank_info", "train_straggler_excess_seconds", "client_overhead_ratio"),
        *("train_own_work_seconds", "train_peer_wait_seconds", "train_own_work_error_seconds"),
    }
)
"""Families of ranks that alerts, recording rules and the commands with ``--prometheus`` read.

The samples and tokens, too. Of ``train_state``, that is the series of the present state.
"""


def is_essential(family: Family | Metric) -> bool:
    """Return whether a page of what is essential has a family: all but others of ranks."""
    return isinstance(family, Metric) or family.labels[:2] != RANK_LABELS or family.name in ESSENTIAL_FAMILIES


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
            least = _MIN_OF_RANK + len(rank.totals.train.phases)
            if room >= 0:
                chosen.add(rank)
                room -= least
            else:
                self._passed_over += least
        return [rank for rank in store.ranks() if rank in chosen]

    def keep(self, families: list[Family | Metric]) -> list[Family | Metric]:
        """Return the families with what fits of their series; counts the others."""
        self.left_out += self._passed_over
        total = sum(len(family.samples) for family in families)
        if total <= self._most:
            return families
        sizes: dict[_Subject | None, int] = {}
        for family in families:
            for subject in _subjects(family):
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
        most = max(self._most, _MAX_OF_FAMILY)
        for place, family in enumerate(families):
            samples = zip(family.samples, _subjects(family), strict=True)
            chosen: list[Any] = [sample for sample, subject in samples if subject in kept][:most]
            if isinstance(family, Metric):
                family.samples = chosen
            else:
                # A collector goes on with its own.
                families[place] = replace(family, samples=chosen)
        self.left_out += total - sum(len(family.samples) for family in families)
        return [family for family in families if family.samples]


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


def _subjects(family: Family | Metric) -> Iterator[_Subject | None]:
    """Yield the subject of each series; None for those of the node."""
    if isinstance(family, Metric):
        labeled = [sample.labels for sample in family.samples]
    else:
        labeled = [dict(zip(family.labels, values, strict=True)) for values, _ in family.samples]
    for labels in labeled:
        run = labels.get("run")
        yield None if run is None else (run, labels.get("rank", ""))


CONTENT_TYPES: Final = ("text/plain", "application/openmetrics-text")


Source = Callable[[], Iterable[Family | Metric]]
"""Returns what is true now; must be quick and must not block."""


class MetricsPage:
    """Renders ``/metrics``.

    Args:
        sources: What the page shows, in its order.
        cap: Bounds the number of series; all are shown without one.
        essential_only: Leave out the families of ranks that are not essential.
    """

    def __init__(
        self, sources: Sequence[Source], cap: SeriesCap | None = None, *, essential_only: bool = False
    ) -> None:
        self._sources = sources
        self._cap = cap
        self._essential_only = essential_only

    def collect(self) -> Iterator[Metric]:
        """Yield every family as a metric of prometheus_client."""
        return (family if isinstance(family, Metric) else _to_metric(family) for family in self._families())

    def render(self, accept: str) -> tuple[bytes, str]:
        """Return the page and its content type, for the ``Accept`` header of a scraper."""
        return render(self._families(), accept)

    def _families(self) -> list[Family | Metric]:
        """Return every family that has a series; those of the cap, if there is one."""
        found = [
            family
            for source in self._sources
            for family in source()
            if family.samples and not (self._essential_only and not is_essential(family))
        ]
        if self._cap is None:
            return found
        found = self._cap.keep(found)
        left_out = Family("label_overflow", "Series left out of pages to keep to the cap.", "counter")
        left_out.add(self._cap.left_out)
        return [*found, left_out]


def _to_metric(family: Family) -> Metric:
    make = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    metric = make(PREFIX + family.name, family.help, labels=family.labels)
    for labels, value in family.samples:
        metric.add_metric(labels, value)
    return metric


def own_metrics(store: Store) -> Iterator[Family]:
    """Yield build and ingest families."""
    build = Family("build_info", "Versions and commit.", "gauge", ("version", "revision", "python_version"))
    build.add(1, __version__, __revision__, platform.python_version())
    yield build
    yield _single("clients", "Training processes connected now.", "gauge", store.connected())
    yield _single("ingest_events", "Steps received.", "counter", store.ingested_steps)
    dropped = {"ring": 0, "outbox": 0, **store.dropped()}
    yield _by("ingest_dropped_events", "Steps lost on their way, by where.", "where", dropped)


def capture_metrics(captures: CaptureCounts, kept: RetentionCounts) -> Iterator[Family]:
    """Yield what has become of captures, and what the captures directory takes."""
    requests = Family("capture_requests", "Captures that ended.", "counter", ("trigger", "result"))
    for (trigger, result), count in captures.requests.items():
        requests.add(count, trigger, result)
    yield requests
    yield _single("capture_bytes", "Bytes of traces captured.", "counter", captures.bytes)
    yield _single("capture_active", "Captures in progress.", "gauge", captures.active)
    yield _moment(
        "capture_last_success_timestamp_seconds",
        "When a capture last completed.",
        captures.last_success_unix_seconds,
    )
    yield _single("captures", "Captures in the captures directory.", "gauge", kept.captures)
    yield _single("captures_bytes", "What the captures directory takes on the disk.", "gauge", kept.bytes)
    if kept.disk_size_bytes:
        yield _single(
            "captures_disk_free_bytes", "Free on the disk of captures.", "gauge", kept.disk_free_bytes
        )
        yield _single(
            "captures_disk_size_bytes", "Size of the disk of captures.", "gauge", kept.disk_size_bytes
        )
    yield _by(
        "captures_removed", "Captures removed to keep to the quota, by its limit.", "reason", kept.removed
    )


def background_metrics(workers: Sequence[WorkerHealth]) -> Iterator[Family]:
    """Yield each background worker's failures, and the time of its last success."""
    yield _by(
        "background_failures",
        "Rounds that a background worker could not finish.",
        "worker",
        {each.worker: each.failures for each in workers},
    )
    yield _by(
        "background_last_success_timestamp_seconds",
        "When a background worker last finished a round.",
        "worker",
        {each.worker: each.last_success_unix_seconds for each in workers if each.last_success_unix_seconds},
        "gauge",
    )


def trigger_metrics(counts: TriggerCounts) -> Iterator[Family]:
    """Yield what has become of triggers."""
    triggers = Family("triggers", "Triggers, by what has become of them.", "counter", ("rule", "result"))
    for (rule, result), count in counts.items():
        triggers.add(count, rule, result.value)
    yield triggers


def goodput_metrics(settled: Callable[[], Mapping[str, Mapping[Bucket, float]]]) -> Iterator[Family]:
    """Yield what settled rank-seconds went to; all buckets of a run are there from the first."""
    family = Family(
        "train_goodput_seconds",
        "Rank-seconds of a run by what they went to, across restarts.",
        "counter",
        ("run", "bucket"),
    )
    for run, seconds in settled().items():
        for bucket in Bucket:
            family.add(seconds[bucket], run, bucket.value)
    yield family


def upload_metrics(counts: UploadCounts) -> Iterator[Family]:
    """Yield what has been uploaded, and what waits; only for a daemon that uploads."""
    yield _by("captures_uploads", "Tries to upload a capture, by outcome.", "result", counts.results)
    yield _single("captures_upload_pending", "Captures that wait to be uploaded.", "gauge", counts.pending)
    yield _single("captures_upload_bytes", "Bytes of captures uploaded.", "counter", counts.bytes)
    yield _moment(
        "captures_upload_last_success_timestamp_seconds",
        "When a capture was last uploaded.",
        counts.last_success_unix_seconds,
    )


def lake_metrics(counts: LakeCounts) -> Iterator[Family]:
    """Yield what has become of the lake's rows; only for a daemon that has one."""
    yield _by("lake_rows", "Rows for the lake, by what has become of them.", "result", counts.rows)
    yield _single("lake_pending_rows", "Rows that wait to be sent.", "gauge", counts.pending.rows)
    yield _single("lake_pending_bytes", "Size of the batches that wait.", "gauge", counts.pending.bytes)
    yield _single("lake_sent_bytes", "Bytes of objects sent to the lake.", "counter", counts.bytes)
    yield _moment(
        "lake_last_success_timestamp_seconds",
        "When the lake last had everything.",
        counts.last_success_unix_seconds,
    )


def fleet_metrics(refused_calls: Callable[[], int], dropped_peers: Callable[[], int]) -> Iterator[Family]:
    """Yield how many calls of other daemons were refused, and how many addresses of theirs were dropped."""
    refused = {"fleet": refused_calls()}
    yield _by("daemon_refused_calls", "Calls without valid credentials.", "listener", refused)
    dropped = {"job": dropped_peers()}
    yield _by("daemon_dropped_peers", "Addresses of daemons that were not accepted.", "source", dropped)


def analysis_metrics(store: Store, counts: AnalysisCounts) -> Iterator[Family]:
    """Yield how analyses have ended, and the newest breakdown of each run that is still here."""
    yield _by("captures_analyses", "Analyses of captures, by outcome.", "result", counts.results)
    yield _moment(
        "captures_analysis_last_success_timestamp_seconds",
        "When an analysis was last stored.",
        counts.last_success_unix_seconds,
    )
    shares = Family(
        "train_captured_device_time_ratio",
        "Where the device time went in the run's newest capture that was analysed; the parts sum to 1.",
        "gauge",
        ("run", "rank", "part"),
    )
    newest = counts.newest
    for run in store.runs():
        for each in newest.get(run, ()):
            for part in ("compute", "exposed_comm", "exposed_memcpy", "idle"):
                shares.add(getattr(each, part), run, str(each.rank), part)
    yield shares


def _single(name: str, text: str, kind: Kind, value: float) -> Family:
    return Family(name, text, kind, samples=[((), value)])


def _moment(name: str, text: str, unix_seconds: float) -> Family:
    """Return a family with a moment; without a series before there was one."""
    return Family(name, text, "gauge", samples=[((), unix_seconds)] if unix_seconds else [])


def _by(name: str, text: str, label: str, values: Mapping[str, float], kind: Kind = "counter") -> Family:
    return Family(name, text, kind, (label,), [((key,), value) for key, value in values.items()])


_COLLECTOR_LABELS = ("collector",)


def node_metrics(samplers: Sequence[Sampler]) -> Iterator[Family]:
    """Yield every sampler's newest families."""
    for sampler in samplers:
        yield from sampler.families


def collector_metrics(samplers: Sequence[Sampler]) -> Iterator[Family]:
    """Yield success and duration of each sampler that has a subject."""
    success = Family("collector_success", "Whether the newest sample succeeded.", "gauge", _COLLECTOR_LABELS)
    duration = Family(
        "collector_duration_seconds", "Time the newest sample took.", "gauge", _COLLECTOR_LABELS
    )
    last = Family(
        "collector_last_success_timestamp_seconds",
        "When a sample last succeeded.",
        "gauge",
        _COLLECTOR_LABELS,
    )
    for sampler in samplers:
        if sampler.has_nothing:
            # A node without GPUs is not one whose driver is broken.
            continue
        success.add(float(sampler.success), sampler.name)
        duration.add(sampler.duration_seconds, sampler.name)
        if sampler.last_success_unix_seconds:
            last.add(sampler.last_success_unix_seconds, sampler.name)
    yield from (success, duration, last)
