"""The fleet's port, as metrics."""

from collections.abc import Callable, Iterator

from torchperfd_daemon.collectors.base import Family


class FleetMetrics:
    """A metrics source about calls of other daemons.

    Args:
        refused_calls: Returns how many calls were refused for want of a valid token.
    """

    def __init__(self, refused_calls: Callable[[], int]) -> None:
        self._refused_calls = refused_calls

    def families(self) -> Iterator[Family]:
        """Return one family, with a series for the fleet's port."""
        refused = Family("daemon_refused_calls", "Calls without valid credentials.", "counter", ("listener",))
        refused.add(self._refused_calls(), "fleet")
        yield refused
