"""The process's own Prometheus page, for those who have no daemon. Opt-in, loopback, small.

A scrape runs in the training process and holds its GIL, which is why the daemon's
page is the better place.
"""

import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

from torchperfd.model import fields
from torchperfd.model.fields import Field
from torchperfd.steps.phases import PhaseNames
from torchperfd.steps.totals import KindTotals, Totals

_LABELS: Final = ("run", "rank")


class Exporter:
    """Serves one rank's totals on ``http://127.0.0.1:<port>/metrics``.

    Args:
        port: 0 for any free one.
        run: Value of the ``run`` label.
        rank: Value of the ``rank`` label.
        names: Phase names.
        totals: Returns the current totals.

    Raises:
        OSError: The port is taken.
    """

    def __init__(
        self, port: int, *, run: str, rank: int, names: PhaseNames, totals: Callable[[], Totals]
    ) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        self._labels = [run, str(rank)]
        self._names = names
        self._totals = totals
        registry = CollectorRegistry()
        registry.register(self)
        self._server, self._thread = start_http_server(port, addr="127.0.0.1", registry=registry)
        self.port: int = self._server.server_port

    def collect(self) -> Iterator[Any]:
        """Yield the metric families, as prometheus_client asks for them."""
        totals = self._totals()
        train = totals.train
        yield self._family(fields.STEPS, train.steps)
        yield self._family(fields.STEP_SECONDS, train.ns / 1e9)
        yield self._phases(train)
        if train.samples:
            yield self._family(fields.SAMPLES, train.samples)
        if train.tokens:
            yield self._family(fields.TOKENS, train.tokens)
        utilization = totals.flops_utilization(train)
        if utilization is not None:
            yield self._family(fields.FLOPS_UTILIZATION, utilization)
        if totals.overhead is not None:
            yield self._family(fields.OVERHEAD, totals.overhead)

    def _phases(self, train: KindTotals) -> Any:
        from prometheus_client.core import CounterMetricFamily

        phases = CounterMetricFamily(
            "torchperfd_train_phase_seconds", "Exclusive host time by phase.", labels=(*_LABELS, "phase")
        )
        for slot in range(len(self._names)):
            if train.phases[slot].calls:
                phases.add_metric([*self._labels, self._names.name(slot)], train.phases[slot].seconds)
        return phases

    def _family(self, field: Field, value: float) -> Any:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        kind = CounterMetricFamily if field.kind == "counter" else GaugeMetricFamily
        family = kind(f"torchperfd_{field.metric}", field.help, labels=_LABELS)
        family.add_metric(self._labels, value)
        return family

    def close(self) -> threading.Thread:
        """Stop serving; return a thread that ends when that is done, which takes up to half a second."""
        closing = threading.Thread(target=self._close, name="torchperfd-exporter", daemon=True)
        closing.start()
        return closing

    def _close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
