"""The metrics page as one message of OTLP."""

import os
import socket
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import (
    AGGREGATION_TEMPORALITY_CUMULATIVE,
    HistogramDataPoint,
    ScopeMetrics,
)
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric as OtlpMetric
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from prometheus_client.core import Metric
from prometheus_client.samples import Sample

from torchperfd._version import __version__
from torchperfd_daemon.push.otlp_names import HardwareName, Instrument, hardware_name, unit_of

_INSTRUMENTS: Final = {"counter": Instrument.COUNTER, "gauge": Instrument.GAUGE, "unknown": Instrument.GAUGE}


def resource_of_node(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return this daemon's attributes, with those that OpenTelemetry's environment variables add."""
    node = socket.gethostname()
    attributes = {
        "service.name": "torchperfd",
        "service.version": __version__,
        "service.instance.id": environ.get("NODE_NAME") or node,
        "host.name": node,
    }
    if name := environ.get("NODE_NAME"):
        attributes["k8s.node.name"] = name
    for pair in environ.get("OTEL_RESOURCE_ATTRIBUTES", "").split(","):
        key, separator, value = pair.partition("=")
        if separator and key.strip():
            attributes[key.strip()] = urllib.parse.unquote(value.strip())
    if service := environ.get("OTEL_SERVICE_NAME"):
        attributes["service.name"] = service
    return attributes


def encode(metrics: Iterable[Metric], resource: Mapping[str, str], unix_ns: int) -> tuple[bytes, int]:
    """Return the message of all series, and the number of its data points.

    Starts of counters are left out: those of ranks began before the daemon, at a time that it does not know.

    Args:
        unix_ns: When they were read.
    """
    scope = ScopeMetrics(scope=InstrumentationScope(name="torchperfd", version=__version__))
    points = 0
    for metric in metrics:
        name = hardware_name(metric)
        if name is not None:
            points += _add_hardware(scope, metric, name, unix_ns)
        if metric.type == "histogram":
            points += _add_histogram(scope, metric, unix_ns)
        elif metric.type in _INSTRUMENTS:
            samples = [each for each in metric.samples if name is None or not name.fits(each)]
            points += _add_own(scope, metric, samples, unix_ns)
    request = ExportMetricsServiceRequest()
    made = request.resource_metrics.add(resource=Resource(attributes=_pairs(resource)))
    made.scope_metrics.append(scope)
    return request.SerializeToString(), points


def _pairs(attributes: Mapping[str, str]) -> list[KeyValue]:
    # As in Prometheus, an empty label is none.
    return [KeyValue(key=key, value=AnyValue(string_value=text)) for key, text in attributes.items() if text]


def _add_hardware(scope: ScopeMetrics, metric: Metric, name: HardwareName, unix_ns: int) -> int:
    samples = [sample for sample in metric.samples if name.fits(sample)]
    if not samples:
        return 0
    made = scope.metrics.add(name=name.name, description=metric.documentation, unit=name.unit)
    points = 0
    for sample in samples:
        attributes = name.attributes(sample)
        states = {"ok": sample.value, "failed": 1 - sample.value} if name.is_status else {"": sample.value}
        for state, value in states.items():
            _add_point(made, name.instrument, {**attributes, "hw.state": state}, value, unix_ns)
            points += 1
    return points


def _add_own(scope: ScopeMetrics, metric: Metric, samples: list[Sample], unix_ns: int) -> int:
    if not samples:
        return 0
    made = scope.metrics.add(name=metric.name, description=metric.documentation, unit=unit_of(metric.name))
    for sample in samples:
        _add_point(made, _INSTRUMENTS[metric.type], sample.labels, sample.value, unix_ns)
    return len(samples)


def _add_point(
    made: OtlpMetric, instrument: Instrument, attributes: Mapping[str, str], value: float, unix_ns: int
) -> None:
    if instrument is Instrument.GAUGE:
        points = made.gauge.data_points
    else:
        made.sum.aggregation_temporality = AGGREGATION_TEMPORALITY_CUMULATIVE
        made.sum.is_monotonic = instrument is Instrument.COUNTER
        points = made.sum.data_points
    points.add(attributes=_pairs(attributes), time_unix_nano=unix_ns, as_double=value)


def _add_histogram(scope: ScopeMetrics, metric: Metric, unix_ns: int) -> int:
    points = list(_histogram_points(metric, unix_ns))
    if points:
        made = scope.metrics.add(
            name=metric.name, description=metric.documentation, unit=unit_of(metric.name)
        )
        made.histogram.aggregation_temporality = AGGREGATION_TEMPORALITY_CUMULATIVE
        made.histogram.data_points.extend(points)
    return len(points)


def _histogram_points(metric: Metric, unix_ns: int) -> Iterator[HistogramDataPoint]:
    """Yield a point for each series: its buckets come one after the other, and each counts those before."""
    series: dict[tuple[tuple[str, str], ...], HistogramDataPoint] = {}
    counted = 0
    for sample in metric.samples:
        labels = {name: value for name, value in sample.labels.items() if name != "le"}
        key = tuple(labels.items())
        if key not in series:
            series[key] = HistogramDataPoint(attributes=_pairs(labels), time_unix_nano=unix_ns)
            counted = 0
        point = series[key]
        if sample.name.endswith("_bucket"):
            if sample.labels["le"] != "+Inf":
                point.explicit_bounds.append(float(sample.labels["le"]))
            point.bucket_counts.append(int(sample.value) - counted)
            point.count = counted = int(sample.value)
        elif sample.name.endswith("_sum"):
            point.sum = sample.value
    yield from series.values()
