"""What the daemon sends to others by itself, as the settings want it."""

import contextlib
from collections.abc import Callable, Iterable

from prometheus_client.core import Metric

from torchperfd_daemon.background import WorkerHealth, run_in_background
from torchperfd_daemon.metrics.page import Source
from torchperfd_daemon.observer.observer import Observer
from torchperfd_daemon.push.pod_events import PodEvents
from torchperfd_daemon.server.checked_settings import CheckedSettings
from torchperfd_daemon.server.workers import NodeSamplers
from torchperfd_daemon.store.store import Store


class Pushes:
    """The senders that are configured.

    Args:
        store: Has the runs on this node.
        samplers: Find the pods of ranks.
        observer: Has the verdicts.
        node: This node's name.

    Attributes:
        health: Of each.
        sources: The metrics on each.
    """

    def __init__(
        self, checked: CheckedSettings, store: Store, samplers: NodeSamplers, observer: Observer, node: str
    ) -> None:
        self.health: list[WorkerHealth] = []
        self.sources: list[Source] = []
        self._otlp = None
        self._events = None
        if checked.otlp is not None:
            # Its messages take memory, and few daemons send any.
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
        if checked.cluster is not None:
            self._events = PodEvents(checked.cluster, store.runs, observer.verdicts, samplers.pod_of, node)
            self.health.append(self._events.health)
            self.sources.append(self._events.counts.families)

    def start(self, stack: contextlib.AsyncExitStack, collect: Callable[[], Iterable[Metric]]) -> None:
        """Send until the stack unwinds.

        Args:
            collect: Reads the metrics page.
        """
        if self._otlp is not None:
            stack.callback(self._otlp.close)
            run_in_background(stack, self._otlp.run(collect))
        if self._events is not None:
            stack.callback(self._events.close)
            run_in_background(stack, self._events.run())
