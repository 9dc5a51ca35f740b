"""Sending metrics over OTLP to real servers: what is retried, what is dropped, and what never waits."""

import asyncio
import datetime
import email.utils
import gzip
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client.core import GaugeMetricFamily, Metric
from tests.integration.web_tls import make_certificate
from tests.support.clock import Clock
from tests.support.node import eventually, free_port
from tests.support.scripted_server import Reply, ScriptedServer

service: Any = pytest.importorskip("opentelemetry.proto.collector.metrics.v1.metrics_service_pb2")
from torchperfd_daemon.push.otlp_endpoint import read_endpoint  # noqa: E402
from torchperfd_daemon.push.otlp_exporter import MAX_RETRY_AFTER_S, OtlpExporter  # noqa: E402
from torchperfd_daemon.push.otlp_transport import Answer, Result, transport_of  # noqa: E402

BASE = "OTEL_EXPORTER_OTLP"
INTERVAL_S = 60.0
START = 1_800_000_000.0


class Exports:
    """An exporter whose waits between attempts take no time.

    Attributes:
        pauses: What it has waited for.
        pages: How often the page was read.
    """

    def __init__(self, url: str, **environ: str) -> None:
        self.clock = Clock(START)
        self.pauses: list[float] = []
        self.pages = 0
        endpoint = read_endpoint(url, {f"{BASE}_{name}": value for name, value in environ.items()})
        self.exporter = OtlpExporter(
            transport_of(endpoint),
            {"service.name": "torchperfd"},
            INTERVAL_S,
            endpoint.url,
            clock=self.clock,
            wall=self.clock,
            wait=self._wait,
            chance=lambda: 0.0,
        )

    def _wait(self, seconds: float) -> bool:
        self.pauses.append(seconds)
        self.clock.now += seconds
        return False

    def collect(self) -> list[Metric]:
        self.pages += 1
        family = GaugeMetricFamily("torchperfd_x", "Help.", labels=["run"])
        family.add_metric(["a"], 1.0)
        family.add_metric(["b"], 2.0)
        return [family]

    def export(self) -> None:
        """Export once, to the end of it."""
        before = sum(self.exporter.counts.messages.values())
        self.exporter.export(self.collect)
        eventually(lambda: sum(self.exporter.counts.messages.values()) > before, 10)
        self.exporter.close()

    @property
    def messages(self) -> dict[str, int]:
        return {result: count for result, count in self.exporter.counts.messages.items() if count}

    @property
    def points(self) -> dict[str, int]:
        return {result: count for result, count in self.exporter.counts.points.items() if count}


def sent(body: bytes) -> list[str]:
    """Return the names of the metrics in a message."""
    (resource,) = service.ExportMetricsServiceRequest.FromString(body).resource_metrics
    return [metric.name for scope in resource.scope_metrics for metric in scope.metrics]


def exported(replies: Sequence[Reply], **environ: str) -> tuple[Exports, ScriptedServer]:
    """Export once to a server that gives these answers."""
    with ScriptedServer(replies) as server:
        exports = Exports(server.url, **environ)
        exports.export()
    return exports, server


def test_export_is_one_post_of_all_metrics() -> None:
    exports, server = exported([Reply()], HEADERS="Authorization=Bearer%20abc")
    (request,) = server.received
    assert request.path == "/v1/metrics"
    assert request.headers["content-type"] == "application/x-protobuf"
    assert request.headers["authorization"] == "Bearer abc"
    assert sent(request.body) == ["torchperfd_x"]
    assert (exports.messages, exports.points) == ({"sent": 1}, {"sent": 2})
    assert exports.exporter.counts.last_success_unix_seconds == START
    assert not exports.exporter.health.is_failing


def test_export_is_compressed_where_that_is_set() -> None:
    _, server = exported([Reply()], COMPRESSION="gzip")
    (request,) = server.received
    assert request.headers["content-encoding"] == "gzip"
    assert sent(gzip.decompress(request.body)) == ["torchperfd_x"]


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_export_is_retried_with_growing_pauses(status: int) -> None:
    exports, server = exported([Reply(status), Reply(status), Reply(status), Reply()])
    assert exports.pauses == [1, 2, 4]
    assert len({request.body for request in server.received}) == 1
    assert (exports.messages, exports.points) == ({"sent": 1}, {"sent": 2})


def test_export_waits_as_long_as_retry_after_says() -> None:
    exports, _ = exported([Reply(429, headers={"Retry-After": "17"}), Reply()])
    assert exports.pauses == [17]
    moment = datetime.datetime.fromtimestamp(time.time() + 30, datetime.UTC)
    exports, _ = exported([Reply(503, headers={"Retry-After": email.utils.format_datetime(moment)}), Reply()])
    assert exports.pauses == [pytest.approx(30, abs=5)]


def test_export_that_fails_until_the_next_is_dropped() -> None:
    exports, server = exported([Reply(503)])
    assert exports.pauses == [1, 2, 4, 8, 16]
    assert len(server.received) == 6
    assert (exports.messages, exports.points) == ({"failed": 1}, {"dropped": 2})
    assert exports.exporter.health.failures == 1


def test_export_asks_nothing_before_retry_after_ends() -> None:
    """A wait beyond the interval drops this message, and skips the next ones; hours are cut to one."""
    with ScriptedServer([Reply(429, headers={"Retry-After": "90000"}), Reply()]) as server:
        exports = Exports(server.url)
        exports.export()
        assert exports.messages == {"failed": 1}
        exports.export()
        assert exports.messages == {"failed": 1, "skipped": 1}
        assert exports.pages == 1
        exports.clock.now += MAX_RETRY_AFTER_S
        exports.export()
    assert exports.messages == {"failed": 1, "skipped": 1, "sent": 1}


@pytest.mark.parametrize("status", [301, 400, 401, 404, 413, 500])
def test_export_that_is_refused_is_not_retried(status: int) -> None:
    exports, server = exported([Reply(status, headers={"Location": "http://127.0.0.1:1/"})])
    assert len(server.received) == 1
    assert (exports.messages, exports.points) == ({"refused": 1}, {"dropped": 2})


def test_export_counts_points_that_are_rejected() -> None:
    response = service.ExportMetricsServiceResponse()
    response.partial_success.rejected_data_points = 1
    response.partial_success.error_message = "too old\nby far"
    exports, _ = exported([Reply(200, response.SerializeToString())])
    assert (exports.messages, exports.points) == ({"sent": 1}, {"sent": 1, "rejected": 1})
    assert exports.exporter.health.failures == 1


def test_export_with_an_answer_of_rubbish_is_sent() -> None:
    exports, _ = exported([Reply(200, b"\xff" * 100_000)])
    assert exports.messages == {"sent": 1}


def test_export_to_a_dead_endpoint_costs_counts_only(caplog: pytest.LogCaptureFixture) -> None:
    exports = Exports(f"http://127.0.0.1:{free_port()}", HEADERS="key=s3cr3t")
    for _ in range(3):
        exports.export()
    assert (exports.messages, exports.points) == ({"failed": 3}, {"dropped": 6})
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "s3cr3t" not in caplog.text


@pytest.fixture
def silent() -> Iterator[int]:
    """A port that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_export_to_a_silent_endpoint_times_out(silent: int) -> None:
    exports = Exports(f"http://127.0.0.1:{silent}", TIMEOUT="10")
    exports.export()
    assert exports.messages == {"failed": 1}


def test_export_is_skipped_while_one_is_on_its_way() -> None:
    """No page is read for it, and nothing is queued."""
    exports, answered = Exports("http://127.0.0.1:9"), threading.Event()

    def hang(_: bytes) -> Answer:
        answered.wait(10)
        return Answer(Result.SENT)

    exports.exporter = OtlpExporter(hang, {}, INTERVAL_S, "url", clock=exports.clock, wall=exports.clock)
    for _ in range(4):
        exports.exporter.export(exports.collect)
    assert exports.messages == {"skipped": 3}
    assert exports.pages == 1
    answered.set()
    exports.exporter.close()
    assert exports.messages == {"skipped": 3, "sent": 1}


def test_export_runs_at_its_interval_until_cancelled() -> None:
    exports, third = Exports("http://127.0.0.1:9"), asyncio.Event()

    async def run() -> OtlpExporter:
        loop = asyncio.get_running_loop()

        def take(_: bytes) -> Answer:
            if exports.pages == 3:
                loop.call_soon_threadsafe(third.set)
            return Answer(Result.SENT)

        exporter = OtlpExporter(take, {}, 0.001, "url")
        task = asyncio.create_task(exporter.run(exports.collect))
        await asyncio.wait_for(third.wait(), 10)
        task.cancel()
        exporter.close()
        return exporter

    exporter = asyncio.run(run())
    assert exporter.counts.messages["sent"] >= 3


@pytest.mark.needs("openssl")
def test_export_over_tls_verifies_the_server(tmp_path: Path) -> None:
    certificate = make_certificate(tmp_path)
    other, _ = make_certificate(tmp_path, "other")
    with ScriptedServer(certificate=certificate) as server:
        trusting = Exports(server.url, CERTIFICATE=str(certificate[0]))
        trusting.export()
        wary = Exports(server.url, CERTIFICATE=str(other))
        wary.export()
    assert trusting.messages == {"sent": 1}
    assert wary.messages == {"failed": 1}
    assert [sent(request.body) for request in server.received] == [["torchperfd_x"]]


class Receiver:
    """OpenTelemetry's service over gRPC: fails with codes in their order, then takes what comes.

    Args:
        details: The `google.rpc.Status` that goes with each failure.
    """

    def __init__(self, *codes: grpc.StatusCode, details: bytes | None = None) -> None:
        self.codes = list(codes)
        self.trailer: tuple[tuple[str, bytes], ...] = (
            () if details is None else (("grpc-status-details-bin", details),)
        )
        self.received: list[tuple[Any, dict[str, Any]]] = []

    def __call__(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.received.append((request, dict(context.invocation_metadata())))
        if self.codes:
            context.set_trailing_metadata(self.trailer)
            context.abort(self.codes.pop(0), "not now")
        return service.ExportMetricsServiceResponse()


def exported_over_grpc(receiver: Receiver, **environ: str) -> Exports:
    server = grpc.server(ThreadPoolExecutor(1))
    method = grpc.unary_unary_rpc_method_handler(
        receiver,
        request_deserializer=service.ExportMetricsServiceRequest.FromString,
        response_serializer=service.ExportMetricsServiceResponse.SerializeToString,
    )
    name = "opentelemetry.proto.collector.metrics.v1.MetricsService"
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, {"Export": method}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        exports = Exports(f"http://127.0.0.1:{port}", PROTOCOL="grpc", **environ)
        exports.export()
        return exports
    finally:
        server.stop(None).wait()


def test_export_over_grpc_is_retried_by_its_code() -> None:
    receiver = Receiver(grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.ABORTED)
    exports = exported_over_grpc(receiver, HEADERS="Api-Key=abc", COMPRESSION="gzip")
    assert exports.pauses == [1, 2]
    assert (exports.messages, exports.points) == ({"sent": 1}, {"sent": 2})
    assert sent(receiver.received[0][0].SerializeToString()) == ["torchperfd_x"]
    assert receiver.received[0][1]["api-key"] == "abc"


@pytest.mark.parametrize("code", [grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAUTHENTICATED])
def test_export_over_grpc_that_is_refused_is_dropped(code: grpc.StatusCode) -> None:
    exports = exported_over_grpc(Receiver(code))
    assert (exports.messages, exports.points) == ({"refused": 1}, {"dropped": 2})


# As a Go collector sends them: a `google.rpc.Status` with a `RetryInfo`, of 17.5 s and of no time.
IN_A_WHILE = bytes.fromhex(
    "08081203747279"  # code and message
    "1a360a28" + b"type.googleapis.com/google.rpc.RetryInfo".hex() + "120a0a0808111080cab5ee01"
)
SOMETIME = bytes.fromhex("08081a2c0a28" + b"type.googleapis.com/google.rpc.RetryInfo".hex() + "1200")


@pytest.mark.parametrize("code", [grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE])
def test_export_over_grpc_waits_as_long_as_retry_info_says(code: grpc.StatusCode) -> None:
    receiver = Receiver(code, details=IN_A_WHILE)
    exports = exported_over_grpc(receiver)
    assert exports.pauses == [17.5]
    assert len(receiver.received) == 2
    assert (exports.messages, exports.points) == ({"sent": 1}, {"sent": 2})


def test_export_over_grpc_to_an_exhausted_receiver_is_dropped() -> None:
    """Only with RetryInfo can it recover; details that cannot be read have none."""
    for details in (None, b"\xff", bytes.fromhex("1a020a00"), bytes.fromhex("1801")):
        exports = exported_over_grpc(Receiver(grpc.StatusCode.RESOURCE_EXHAUSTED, details=details))
        assert (exports.messages, exports.points) == ({"refused": 1}, {"dropped": 2})


def test_export_is_retried_with_pauses_if_asked_for_no_time() -> None:
    exports, _ = exported([Reply(503, headers={"Retry-After": "0"})] * 3 + [Reply()])
    assert exports.pauses == [1, 2, 4]
    exhausted = [grpc.StatusCode.RESOURCE_EXHAUSTED] * 3
    assert exported_over_grpc(Receiver(*exhausted, details=SOMETIME)).pauses == [1, 2, 4]
