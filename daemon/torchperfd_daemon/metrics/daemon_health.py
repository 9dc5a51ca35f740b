"""Metrics on the daemon's health and work, and on its samplers: a function for each part's families."""

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence

from torchperfd._version import __revision__, __version__
from torchperfd_daemon.background import WorkerHealth
from torchperfd_daemon.captures import AnalysisCounts, CaptureCounts, RetentionCounts, UploadCounts
from torchperfd_daemon.collectors.base import Family, Kind, Sampler
from torchperfd_daemon.goodput import Bucket
from torchperfd_daemon.store import Store
from torchperfd_daemon.triggers import TriggerCounts


def own_metrics(store: Store, captures: CaptureCounts, kept: RetentionCounts) -> Iterator[Family]:
    """Yield build, ingest and capture families."""
    build = Family("build_info", "Versions and commit.", "gauge", ("version", "revision", "python_version"))
    build.add(1, __version__, __revision__, platform.python_version())
    yield build
    yield _single("clients", "Training processes connected now.", "gauge", store.connected())
    yield _single("ingest_events", "Steps received.", "counter", store.ingested_steps)
    dropped = {"ring": 0, "outbox": 0, **store.dropped()}
    yield _by("ingest_dropped_events", "Steps lost on their way, by where.", "where", dropped)
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
    """Yield every sampler's newest families, then success and duration of each that has a subject."""
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
        yield from sampler.families
        if sampler.has_nothing:
            # A node without GPUs is not one whose driver is broken.
            continue
        success.add(float(sampler.success), sampler.name)
        duration.add(sampler.duration_seconds, sampler.name)
        if sampler.last_success_unix_seconds:
            last.add(sampler.last_success_unix_seconds, sampler.name)
    yield from (success, duration, last)
