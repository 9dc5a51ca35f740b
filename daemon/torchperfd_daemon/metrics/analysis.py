"""Metrics of the analyses of captures; only for a daemon that analyses."""

from collections.abc import Iterator

from torchperfd_daemon.captures import AnalysisCounts
from torchperfd_daemon.collectors.base import Family
from torchperfd_daemon.store import Store


class AnalysisMetrics:
    """A metrics source: counts of analyses, and the newest breakdown of each run that is still here."""

    def __init__(self, store: Store, counts: AnalysisCounts) -> None:
        self._store = store
        self._counts = counts

    def families(self) -> Iterator[Family]:
        """Return how analyses have ended, and where the ranks' device time went."""
        analyses = Family("captures_analyses", "Analyses of captures, by outcome.", "counter", ("result",))
        for result, count in self._counts.results.items():
            analyses.add(count, result)
        yield analyses
        if self._counts.last_success_unix_seconds:
            last = Family(
                "captures_analysis_last_success_timestamp_seconds",
                "When an analysis was last stored.",
                "gauge",
            )
            last.add(self._counts.last_success_unix_seconds)
            yield last
        shares = Family(
            "train_captured_device_time_ratio",
            "Where the device time went in the run's newest capture that was analysed; the parts sum to 1.",
            "gauge",
            ("run", "rank", "part"),
        )
        newest = self._counts.newest
        for run in self._store.runs():
            for each in newest.get(run, ()):
                for part in ("compute", "exposed_comm", "exposed_memcpy", "idle"):
                    shares.add(getattr(each, part), run, str(each.rank), part)
        yield shares
