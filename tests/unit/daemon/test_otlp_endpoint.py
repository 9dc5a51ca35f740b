"""Where metrics go over OTLP: the flag's URL, and OpenTelemetry's variables."""

import contextlib
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.integration.web_tls import make_certificate

from torchperfd_daemon.errors import UsageError
from torchperfd_daemon.push.otlp_endpoint import Protocol, read_endpoint

pytest.importorskip("opentelemetry.proto.collector.metrics.v1.metrics_service_pb2")

BASE = "OTEL_EXPORTER_OTLP"


@pytest.mark.parametrize(
    ("value", "environ", "url"),
    [
        ("http://localhost:4318", {}, "http://localhost:4318/v1/metrics"),
        ("http://localhost:4318/v1/metrics", {}, "http://localhost:4318/v1/metrics"),
        ("https://otlp.example.org/otlp/", {}, "https://otlp.example.org:443/otlp/v1/metrics"),
        ("http://[::1]:4318", {}, "http://[::1]:4318/v1/metrics"),
        ("env", {f"{BASE}_ENDPOINT": "http://a:1/x"}, "http://a:1/x/v1/metrics"),
        ("env", {f"{BASE}_ENDPOINT": "http://a", f"{BASE}_METRICS_ENDPOINT": "http://b:2"}, "http://b:2/"),
        ("env", {f"{BASE}_METRICS_ENDPOINT": "http://b:2/in"}, "http://b:2/in"),
    ],
)
def test_endpoint_path_follows_the_specification(value: str, environ: Mapping[str, str], url: str) -> None:
    assert read_endpoint(value, environ).url == url


def test_endpoint_variables_of_metrics_win() -> None:
    environ = {
        f"{BASE}_PROTOCOL": "http/protobuf",
        f"{BASE}_METRICS_PROTOCOL": "grpc",
        f"{BASE}_HEADERS": "api-key=a%20b, x=1",
        f"{BASE}_TIMEOUT": "2500",
        f"{BASE}_COMPRESSION": "gzip",
    }
    endpoint = read_endpoint("http://localhost:4317", environ)
    assert endpoint.protocol is Protocol.GRPC
    assert endpoint.headers == (("api-key", "a b"), ("x", "1"))
    assert endpoint.timeout_seconds == 2.5
    assert endpoint.is_gzipped
    assert (
        read_endpoint("http://localhost", {**environ, f"{BASE}_METRICS_TIMEOUT": "10"}).timeout_seconds
        == 0.01
    )


@pytest.mark.parametrize(
    ("value", "environ"),
    [
        ("env", {}),
        ("localhost:4318", {}),
        ("ftp://localhost", {}),
        ("http://user:s3cr3t@localhost", {}),
        ("http://localhost:99999", {}),
        ("http://localhost?key=s3cr3t", {}),
        ("http://localhost", {f"{BASE}_PROTOCOL": "http/json"}),
        ("http://localhost", {f"{BASE}_TIMEOUT": "soon"}),
        ("http://localhost", {f"{BASE}_COMPRESSION": "zstd"}),
        ("http://localhost", {f"{BASE}_HEADERS": "s3cr3t"}),
        ("http://localhost", {f"{BASE}_HEADERS": "a=s3cr3t%0d%0ab: c"}),
        ("https://localhost", {f"{BASE}_CERTIFICATE": "/nowhere/s3cr3t"}),
    ],
)
def test_endpoint_that_is_invalid_is_refused(value: str, environ: Mapping[str, str]) -> None:
    with pytest.raises(UsageError) as error:
        read_endpoint(value, environ)
    assert "s3cr3t" not in str(error.value)
    assert "\n" not in str(error.value)


@settings(max_examples=50)
@given(st.text(max_size=40) | st.from_regex(r"https?://[!-~]{0,20}", fullmatch=True), st.text(max_size=30))
def test_endpoint_of_any_text_is_read_or_refused(value: str, headers: str) -> None:
    with contextlib.suppress(UsageError):
        endpoint = read_endpoint(value, {f"{BASE}_HEADERS": headers})
        assert endpoint.host
        assert 0 <= endpoint.port <= 65535
        assert "\n" not in "".join(text for pair in endpoint.headers for text in pair)


@pytest.mark.needs("openssl")
def test_endpoint_certificates_are_read_at_once(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    environ = {
        f"{BASE}_CERTIFICATE": str(certificate),
        f"{BASE}_CLIENT_CERTIFICATE": str(certificate),
        f"{BASE}_CLIENT_KEY": str(key),
    }
    assert read_endpoint("https://127.0.0.1", environ).is_tls
    key.write_text("no key")
    with pytest.raises(UsageError, match="cannot be used"):
        read_endpoint("https://127.0.0.1", environ)
