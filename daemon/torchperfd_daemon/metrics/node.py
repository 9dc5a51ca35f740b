"""What the samplers hold, as metrics, and how each of them is doing."""

from collections.abc import Iterator, Sequence

from torchperfd_daemon.collectors.base import Family, Sampler

_COLLECTOR = ("collector",)


def node_metrics(samplers: Sequence[Sampler]) -> Iterator[Family]:
    """Yield every sampler's newest families, then success and duration of each that has a subject."""
    success = Family("collector_success", "Whether the newest sample succeeded.", "gauge", _COLLECTOR)
    duration = Family("collector_duration_seconds", "Time the newest sample took.", "gauge", _COLLECTOR)
    last = Family(
        "collector_last_success_timestamp_seconds", "When a sample last succeeded.", "gauge", _COLLECTOR
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
