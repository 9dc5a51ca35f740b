"""What has become of triggers, as a metric."""

from collections.abc import Iterator

from torchperfd_daemon.collectors.base import Family
from torchperfd_daemon.triggers import TriggerCounts


class TriggerMetrics:
    """A metrics source over the triggers' counts."""

    def __init__(self, counts: TriggerCounts) -> None:
        self._counts = counts

    def families(self) -> Iterator[Family]:
        """Return the one family."""
        triggers = Family("triggers", "Triggers, by what has become of them.", "counter", ("rule", "result"))
        for (rule, result), count in self._counts.items():
            triggers.add(count, rule, result.value)
        yield triggers
