"""Where metrics go over OTLP, and how: from ``--otlp`` and OpenTelemetry's own environment variables."""

import os
import re
import ssl
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final
from urllib.parse import SplitResult

from torchperfd_daemon.errors import TorchperfdError, UsageError, shown_value

ENVIRONMENT: Final = "env"
"""Stands for the endpoint that the environment names."""

_PATH: Final = "/v1/metrics"
_PORTS: Final = {"http": 80, "https": 443}
_DEFAULT_TIMEOUT_MS: Final = 10_000
MAX_TIMEOUT_S: Final = 60.0
_HEADER_NAME: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,200}")
_HEADER_VALUE: Final = re.compile(r"[\t\x20-\x7e]{0,8192}")


class Protocol(Enum):
    """How a message is carried."""

    HTTP = "http/protobuf"
    GRPC = "grpc"


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Files in PEM, for the server's authority and our certificate; None where the environment names none."""

    authority: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    def context(self) -> ssl.SSLContext:
        """Return what verifies the server; the files are read now, since certificates are renewed.

        Raises:
            OSError: A file cannot be read, or is no certificate.
        """
        context = ssl.create_default_context(cafile=str(self.authority) if self.authority else None)
        if self.certificate is not None:
            context.load_cert_chain(self.certificate, self.key)
        return context


@dataclass(frozen=True, slots=True)
class OtlpEndpoint:
    """A receiver of OTLP.

    Attributes:
        path: Where it takes metrics over HTTP.
        headers: Sent with each message; they may be secret.
        timeout_seconds: Of one attempt.
    """

    host: str
    port: int
    path: str
    is_tls: bool
    protocol: Protocol
    headers: tuple[tuple[str, str], ...]
    timeout_seconds: float
    is_gzipped: bool
    tls: TlsFiles

    @property
    def url(self) -> str:
        """Its address, without anything secret."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' if self.is_tls else ''}://{host}:{self.port}{self.path}"


def read_endpoint(value: str, environ: Mapping[str, str] = os.environ) -> OtlpEndpoint:
    """Return the endpoint of ``--otlp``.

    Args:
        value: The URL that ``/v1/metrics`` is added to; ``env`` for that of the environment.

    Raises:
        UsageError: It is no such URL, or a variable is invalid; no secret is in the message.
        TorchperfdError: opentelemetry-proto is not installed.
    """
    _check_installed()
    whole = ""
    if value == ENVIRONMENT:
        whole = environ.get("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "")
        value = whole or environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "")
        if not value:
            raise UsageError(
                "--otlp env: no OTEL_EXPORTER_OTLP_ENDPOINT is set", "set it, or write --otlp URL"
            )
    parts, port = _split(value)
    protocol = _protocol(_variable(environ, "PROTOCOL"))
    path = parts.path if whole else parts.path.rstrip("/").removesuffix(_PATH) + _PATH
    compression = _variable(environ, "COMPRESSION")
    if compression not in ("", "none", "gzip"):
        raise UsageError(f"{shown_value(compression)} is no compression of OTLP", "use gzip or none")
    endpoint = OtlpEndpoint(
        parts.hostname or "",
        port,
        (path or "/") if protocol is Protocol.HTTP else "",
        parts.scheme == "https",
        protocol,
        _headers(_variable(environ, "HEADERS")),
        _timeout_seconds(_variable(environ, "TIMEOUT")),
        compression == "gzip",
        TlsFiles(
            *(
                Path(name) if (name := _variable(environ, variable)) else None
                for variable in ("CERTIFICATE", "CLIENT_CERTIFICATE", "CLIENT_KEY")
            )
        ),
    )
    if endpoint.is_tls:
        try:
            endpoint.tls.context()
        except OSError as error:
            raise UsageError(
                f"the certificates of OTEL_EXPORTER_OTLP_CERTIFICATE, _CLIENT_CERTIFICATE and _CLIENT_KEY"
                f" cannot be used: {error.strerror or error}",
                "name files in PEM that the daemon may read",
            ) from error
    return endpoint


def _check_installed() -> None:
    try:
        import opentelemetry.proto.collector.metrics.v1.metrics_service_pb2  # noqa: F401
    except (ImportError, TypeError) as error:
        # A generated module of another protobuf raises TypeError.
        raise TorchperfdError(
            f"--otlp needs opentelemetry-proto: {error}", "`pip install opentelemetry-proto`"
        ) from error


def _variable(environ: Mapping[str, str], name: str) -> str:
    """Return a variable of OTLP; that of metrics alone goes before that of all signals."""
    both = (f"OTEL_EXPORTER_OTLP_METRICS_{name}", f"OTEL_EXPORTER_OTLP_{name}")
    return next((value for each in both if (value := environ.get(each, "").strip())), "")


def _split(url: str) -> tuple[SplitResult, int]:
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = SplitResult("", "", "", "", ""), None
    if (
        parts.scheme not in _PORTS
        or not parts.hostname
        or parts.query
        or parts.fragment
        or parts.username is not None
        or not re.fullmatch(r"[\x21-\x7e]+", url)
    ):
        raise UsageError(
            "the endpoint of OTLP is no URL that can be used",
            "write it like http://localhost:4318, with secrets in OTEL_EXPORTER_OTLP_HEADERS",
        )
    return parts, _PORTS[parts.scheme] if port is None else port


def _protocol(name: str) -> Protocol:
    try:
        return Protocol(name or Protocol.HTTP.value)
    except ValueError:
        raise UsageError(
            f"{shown_value(name)} is no protocol of OTLP here", "use http/protobuf or grpc"
        ) from None


def _timeout_seconds(text: str) -> float:
    milliseconds = int(text) if text.isdecimal() and len(text) < 10 else None
    if text and not milliseconds:
        raise UsageError(
            f"OTEL_EXPORTER_OTLP_TIMEOUT: {shown_value(text)} is no time in milliseconds", "write 10000"
        )
    return min(MAX_TIMEOUT_S, (milliseconds or _DEFAULT_TIMEOUT_MS) / 1e3)


def _headers(text: str) -> tuple[tuple[str, str], ...]:
    found = []
    for pair in filter(None, map(str.strip, text.split(","))):
        name, separator, value = pair.partition("=")
        value = urllib.parse.unquote(value.strip())
        if not separator or not _HEADER_NAME.fullmatch(name.strip()) or not _HEADER_VALUE.fullmatch(value):
            raise UsageError(
                "OTEL_EXPORTER_OTLP_HEADERS cannot be read", "write it like name=value,other=value"
            )
        found.append((name.strip(), value))
    return tuple(found)
