"""What the daemon sends to others by itself, as the settings want it."""

import contextlib
from collections.abc import Callable, Iterable

from prometheus_client.core import Metric

from torchperfd_daemon.background import WorkerHealth, run_in_background
from torchperfd_daemon.metrics.page import Source
from torchperfd_daemon.server.checked_settings import CheckedSettings


class Pushes:
    """The senders that are configured.

    Attributes:
        health: Of each.
        sources: The metrics on each.
    """

    def __init__(self, checked: CheckedSettings) -> None:
        self.health: list[WorkerHealth] = []
        self.sources: list[Source] = []
        self._otlp = None
        if checked.otlp is not None:
            # What it sends in is heavy, and few daemons send anything.
            from torchperfd_daemon.push.otlp_exporter import OtlpExporter
            from torchperfd_daemon.push.otlp_messages import resource_of_node
            from torchperfd_daemon.push.otlp_transport import transport_of

            self._otlp = OtlpExporter(
                transport_of(checked.otlp),
                resource_of_node(),
                checked.settings.otlp_interval_seconds,
                checked.otlp.url,
            )
            self.health.append(self._otlp.health)
            self.sources.append(self._otlp.counts.families)

    def start(self, stack: contextlib.AsyncExitStack, collect: Callable[[], Iterable[Metric]]) -> None:
        """Send until the stack unwinds.

        Args:
            collect: Reads the metrics page.
        """
        if self._otlp is not None:
            stack.callback(self._otlp.close)
            run_in_background(stack, self._otlp.run(collect))
