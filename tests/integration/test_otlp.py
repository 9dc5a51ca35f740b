"""A real daemon sends its metrics to a real collector of OpenTelemetry: rotel, as pip installs it."""

import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.core import GaugeMetricFamily
from tests.support.node import Node, eventually, free_port

rotel: Any = pytest.importorskip("rotel")
pytest.importorskip("opentelemetry.proto.collector.metrics.v1.metrics_service_pb2")
from torchperfd_daemon.push.otlp_endpoint import read_endpoint  # noqa: E402
from torchperfd_daemon.push.otlp_messages import encode  # noqa: E402
from torchperfd_daemon.push.otlp_names import HARDWARE_NAMES, Instrument  # noqa: E402
from torchperfd_daemon.push.otlp_transport import Answer, Result, transport_of  # noqa: E402


class Collector:
    """A collector that prints what it receives, over HTTP and over gRPC."""

    def __init__(self, directory: Path) -> None:
        self.ports = {"http/protobuf": free_port(), "grpc": free_port()}
        self._out = directory / "collector.out"
        with self._out.open("wb") as file:
            self._process = subprocess.Popen(
                [
                    *(str(Path(rotel.__file__).with_name("rotel-agent")), "start"),
                    *("--log-file", str(directory / "log"), "--pid-file", str(directory / "pid")),
                    *("--otlp-http-endpoint", f"127.0.0.1:{self.ports['http/protobuf']}"),
                    *("--otlp-grpc-endpoint", f"127.0.0.1:{self.ports['grpc']}"),
                    *("--exporter", "blackhole", "--debug-log", "metrics"),
                    *("--debug-log-verbosity", "detailed"),
                ],
                stdout=file,
                stderr=file,
            )
        eventually(lambda: "Starting Rotel" in self.text(), 10, self.text)

    def text(self) -> str:
        """Return what it has printed."""
        return self._out.read_text()

    def metrics(self) -> dict[str, tuple[str, str]]:
        """Return unit and kind of each metric that it has received, by name."""
        pattern = r"-> Name: (\S+)\n.*?-> Unit: (\S*)\n\s*-> DataType: (\w+)"
        return {name: (unit, kind) for name, unit, kind in re.findall(pattern, self.text(), re.DOTALL)}

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(10)


@pytest.fixture
def collector(tmp_path: Path) -> Iterator[Collector]:
    started = Collector(tmp_path)
    yield started
    started.close()


def sent_names(node: Node) -> set[str]:
    """Return the names over OTLP of what a daemon's page shows."""
    lines = node.get("/metrics")[1].splitlines()
    families = {line.split(" ")[2].removesuffix("_total") for line in lines if line.startswith("# TYPE")}
    hardware = {f"torchperfd_{each.family}": each.name for each in HARDWARE_NAMES}
    return {hardware.get(name, name) for name in families}


def test_collector_receives_all_that_the_page_shows(collector: Collector, node: Node) -> None:
    node.env["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://127.0.0.1:{collector.ports['http/protobuf']}"
    node.start_daemon("--demo", "--interval", "0.1", "--otlp", "env", "--otlp-interval", "1")
    eventually(lambda: node.metric('torchperfd_otlp_messages_total{result="sent"}'), 20, node.log)
    eventually(lambda: sent_names(node) <= collector.metrics().keys(), 10, node.log)
    received = collector.metrics()
    simulated = [name for name in HARDWARE_NAMES if name.name in received]
    assert len(simulated) >= 7
    for name in simulated:
        assert received[name.name] == (name.unit, "Gauge" if name.instrument is Instrument.GAUGE else "Sum")
    assert received["torchperfd_train_step_duration_seconds"] == ("s", "Histogram")
    assert "-> service.name: Str(torchperfd)" in collector.text()


def test_collector_takes_a_message_over_grpc(collector: Collector) -> None:
    power = GaugeMetricFamily("torchperfd_gpu_power_watts", "Power.", labels=["gpu", "gpu_uuid"])
    power.add_metric(["0", "GPU-x"], 412.5)
    body, _ = encode([power], {"service.name": "torchperfd"}, time.time_ns())
    environ = {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip"}
    endpoint = read_endpoint(f"http://127.0.0.1:{collector.ports['grpc']}", environ)
    assert transport_of(endpoint)(body) == Answer(Result.SENT)
    eventually(lambda: collector.metrics() == {"hw.power": ("W", "Gauge")}, 10, collector.text)
    assert "-> hw.id: Str(GPU-x)" in collector.text()
