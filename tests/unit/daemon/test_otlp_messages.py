"""Metrics over OTLP: their names are the conventions', and each series of the page is in the message."""

import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families as parse_text
from tests.support.node import ROOT

from torchperfd_daemon.collectors.base import Family
from torchperfd_daemon.collectors.gpu_readings import FAMILIES
from torchperfd_daemon.metrics.page import MetricsPage
from torchperfd_daemon.push.otlp_names import HARDWARE_NAMES, unit_of

service: Any = pytest.importorskip("opentelemetry.proto.collector.metrics.v1.metrics_service_pb2")
from torchperfd_daemon.push.otlp_messages import encode, resource_of_node  # noqa: E402

NOW_NS = 1_800_000_000_000_000_000
PAGE = list(parse_text((ROOT / "tests" / "golden" / "metrics.txt").read_text()))


def decoded(metrics: list[Metric]) -> tuple[dict[str, Any], int]:
    """Return the metrics of a message by name, and the number of points that it is said to have."""
    body, points = encode(metrics, {"service.name": "torchperfd"}, NOW_NS)
    (resource,) = service.ExportMetricsServiceRequest.FromString(body).resource_metrics
    (scope,) = resource.scope_metrics
    return {metric.name: metric for metric in scope.metrics}, points


def points_of(metric: Any) -> list[Any]:
    return list(getattr(metric, metric.WhichOneof("data")).data_points)


def attributes_of(point: Any) -> dict[str, str]:
    return {pair.key: pair.value.string_value for pair in point.attributes}


@pytest.mark.parametrize("name", HARDWARE_NAMES, ids=lambda name: name.family)
def test_hardware_name_is_one_of_the_conventions(name: Any) -> None:
    """OpenTelemetry's own package of them is the judge."""
    attributes = pytest.importorskip("opentelemetry.semconv._incubating.attributes.hw_attributes")
    metrics = pytest.importorskip("opentelemetry.semconv._incubating.metrics.hw_metrics")
    key = name.name.upper().replace(".", "_")
    assert getattr(metrics, key) == name.name
    assert name.family in FAMILIES
    described = f"Instrument: {name.instrument.value.lower()}\nUnit: {name.unit}\n"
    text = (ROOT / metrics.__file__).read_text()
    following = text.partition(f'{key}: Final = "{name.name}"\n')[2]
    assert described in following.partition('"""')[2].partition('"""')[0]
    known = {value for each, value in vars(attributes).items() if each.startswith("HW_")}
    used = {*name.constants, *name.labels.values()} - {"error.type", "network.io.direction"}
    assert used <= known


def test_message_has_each_series_of_the_page() -> None:
    """Conventional names take the place of ours; a status is of two states; empty labels are left out."""
    metrics, points = decoded(PAGE)
    assert points == sum(len(points_of(metric)) for metric in metrics.values())
    conventional = {f"torchperfd_{name.family}": name for name in HARDWARE_NAMES}
    for family in PAGE:
        if family.type == "histogram":
            continue
        expected = Counter[tuple[tuple[str, str], ...]]()
        for sample in family.samples:
            name = conventional.get(family.name)
            if name is None or any(sample.labels[label] != text for label, text in name.only.items()):
                expected[tuple(sorted((key, text) for key, text in sample.labels.items() if text))] += 1
        if not expected:
            assert family.name not in metrics
            continue
        sent = metrics[family.name]
        assert sent.unit == unit_of(family.name)
        assert sent.WhichOneof("data") == ("sum" if family.type == "counter" else "gauge")
        assert Counter(tuple(sorted(attributes_of(point).items())) for point in points_of(sent)) == expected
    # The page of the golden file has errors of a made-up scope.
    assert {name.name for name in HARDWARE_NAMES} - metrics.keys() == {"hw.errors"}


def gpu_page(name: str, value: float, **labels: str) -> list[Metric]:
    """Return a page with one series of a GPU."""
    _, kind, _ = FAMILIES[name]
    names = ("gpu", "gpu_uuid", *labels)
    family = Family(name, "Help.", kind, names, [(("3", "GPU-x", *labels.values()), value)])
    return list(MetricsPage([lambda: [family]]).collect())


def test_message_names_a_gpu_by_its_uuid() -> None:
    metrics, _ = decoded(gpu_page("gpu_power_watts", 412.5))
    (point,) = points_of(metrics["hw.power"])
    assert attributes_of(point) == {"hw.id": "GPU-x", "hw.name": "3", "hw.type": "gpu"}
    assert (point.as_double, point.time_unix_nano) == (412.5, NOW_NS)


def test_message_of_a_sensor_names_its_gpu_as_parent() -> None:
    metrics, _ = decoded(gpu_page("gpu_temperature_celsius", 71, sensor="memory"))
    (point,) = points_of(metrics["hw.temperature"])
    assert attributes_of(point) == {
        "hw.id": "GPU-x/memory",
        "hw.name": "3",
        "hw.parent": "GPU-x",
        "hw.sensor_location": "memory",
        "hw.type": "temperature",
    }


def test_message_of_a_lost_gpu_has_failed_as_its_state() -> None:
    metrics, points = decoded(gpu_page("gpu_up", 0))
    states = {attributes_of(point)["hw.state"]: point.as_double for point in points_of(metrics["hw.status"])}
    assert states == {"ok": 0, "failed": 1}
    assert points == 2


def test_message_counts_errors_since_the_driver_loaded() -> None:
    """Those over the GPU's life keep our name: one metric must not count an error twice."""
    volatile, _ = decoded(gpu_page("gpu_ecc_errors", 2, type="corrected", scope="volatile"))
    assert attributes_of(points_of(volatile["hw.errors"])[0])["error.type"] == "corrected"
    assert volatile["hw.errors"].sum.is_monotonic
    aggregate, _ = decoded(gpu_page("gpu_ecc_errors", 9, type="corrected", scope="aggregate"))
    assert list(aggregate) == ["torchperfd_gpu_ecc_errors"]


def test_message_histogram_has_the_counts_of_its_buckets() -> None:
    lines = ['x_bucket{run="a",le="0.1"} 3', 'x_bucket{run="a",le="1"} 3', 'x_bucket{run="a",le="+Inf"} 5']
    lines += ['x_count{run="a"} 5', 'x_sum{run="a"} 7.5', 'x_bucket{run="b",le="+Inf"} 1', 'x_sum{run="b"} 2']
    metrics, points = decoded(list(parse_text("# TYPE x histogram\n" + "\n".join(lines) + "\n")))
    first, second = points_of(metrics["x"])
    assert (list(first.explicit_bounds), list(first.bucket_counts)) == ([0.1, 1.0], [3, 0, 2])
    assert (first.count, first.sum, second.count, list(second.bucket_counts)) == (5, 7.5, 1, [1])
    assert points == 2


LABELS = st.text(st.characters(codec="utf-8"), max_size=8)


@given(st.lists(st.tuples(LABELS, st.floats()), unique_by=lambda each: each[0], max_size=5))
def test_message_keeps_any_label_and_value(samples: list[tuple[str, float]]) -> None:
    family = Family(
        "node_x_bytes", "Help.", "counter", ("part",), [((text,), value) for text, value in samples]
    )
    metrics, points = decoded(list(MetricsPage([lambda: [family]]).collect()))
    assert points == len(samples)
    found = [
        (attributes_of(point).get("part", ""), point.as_double)
        for metric in metrics.values()
        for point in points_of(metric)
    ]
    for (text, value), (sent, number) in zip(samples, found, strict=True):
        assert text == sent
        assert number == value or (math.isnan(number) and math.isnan(value))


def test_resource_has_what_the_environment_adds() -> None:
    environ = {
        "NODE_NAME": "node-7",
        "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment=a%20b,host.name=other,broken",
        "OTEL_SERVICE_NAME": "gpus",
    }
    found = resource_of_node(environ)
    assert found["service.name"] == "gpus"
    assert found["k8s.node.name"] == found["service.instance.id"] == "node-7"
    assert found["deployment.environment"] == "a b"
    assert found["host.name"] == "other"
    assert "broken" not in found
