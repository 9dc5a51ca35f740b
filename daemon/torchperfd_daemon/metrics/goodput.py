"""Goodput, as metrics: what the rank-seconds of the runs that are here went to."""

from collections.abc import Callable, Iterator, Mapping

from torchperfd_daemon.collectors.base import Family
from torchperfd_daemon.goodput import Bucket


class GoodputMetrics:
    """A metrics source over the goodput totals.

    Args:
        seconds: Returns rank-seconds by run and bucket, such as are settled; see ``GoodputTracker``.
    """

    def __init__(self, seconds: Callable[[], Mapping[str, Mapping[Bucket, float]]]) -> None:
        self._seconds = seconds

    def families(self) -> Iterator[Family]:
        """Return what time went to; all buckets of a run are there from the first."""
        family = Family(
            "train_goodput_seconds",
            "Rank-seconds of a run by what they went to, across restarts.",
            "counter",
            ("run", "bucket"),
        )
        for run, seconds in self._seconds().items():
            for bucket in Bucket:
                family.add(seconds[bucket], run, bucket.value)
        yield family
