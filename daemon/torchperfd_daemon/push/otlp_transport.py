"""Carries one message of OTLP to its endpoint, over HTTP or gRPC, and says what became of it."""

import email.utils
import gzip
import http.client
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final

import grpc
from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse

from torchperfd._version import __version__
from torchperfd.model.formatting import one_line
from torchperfd_daemon.push.otlp_endpoint import OtlpEndpoint, Protocol

MAX_ANSWER_BYTES: Final = 64 * 1024
_MAX_PROBLEM: Final = 200
_RETRYABLE_STATUS: Final = frozenset({429, 502, 503, 504})
_RETRYABLE_CODES: Final = frozenset(
    {
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
    }
)
_DETAILS: Final = "grpc-status-details-bin"
_RETRY_INFO: Final = "type.googleapis.com/google.rpc.RetryInfo"
_METHOD: Final = "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export"
_USER_AGENT: Final = f"torchperfd/{__version__}"


class Result(Enum):
    """What became of an attempt."""

    SENT = "sent"
    RETRY = "retry"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Answer:
    """The endpoint's answer to a message.

    Attributes:
        rejected: Points of a message that was sent which the endpoint did not take.
        retry_after_seconds: When it wants to be asked again; None if it does not say.
        problem: Why, in one line; empty without one.
    """

    result: Result
    rejected: int = 0
    retry_after_seconds: float | None = None
    problem: str = ""


Transport = Callable[[bytes], Answer]
"""Makes one attempt to carry a message; raises nothing."""


def transport_of(endpoint: OtlpEndpoint) -> Transport:
    """Return the transport of an endpoint's protocol."""
    send = _send_http if endpoint.protocol is Protocol.HTTP else _send_grpc
    return lambda body: send(endpoint, body)


def _send_http(endpoint: OtlpEndpoint, body: bytes) -> Answer:
    headers = {"User-Agent": _USER_AGENT, **dict(endpoint.headers), "Content-Type": "application/x-protobuf"}
    if endpoint.is_gzipped:
        headers["Content-Encoding"] = "gzip"
        body = gzip.compress(body, 1)
    connection: http.client.HTTPConnection | None = None
    try:
        if endpoint.is_tls:
            connection = http.client.HTTPSConnection(
                endpoint.host,
                endpoint.port,
                timeout=endpoint.timeout_seconds,
                context=endpoint.tls.context(),
            )
        else:
            connection = http.client.HTTPConnection(
                endpoint.host, endpoint.port, timeout=endpoint.timeout_seconds
            )
        connection.request("POST", endpoint.path, body, headers)
        response = connection.getresponse()
        content = response.read(MAX_ANSWER_BYTES)
    except (OSError, http.client.HTTPException, ValueError) as error:
        return Answer(Result.RETRY, problem=_line(str(error) or type(error).__name__))
    finally:
        if connection is not None:
            connection.close()
    if response.status == http.client.OK:
        return _answer_of(content)
    problem = f"HTTP {response.status} {_line(response.reason)}".rstrip()
    if response.status in _RETRYABLE_STATUS:
        return Answer(Result.RETRY, 0, _retry_after(response.getheader("Retry-After", "")), problem)
    return Answer(Result.REFUSED, problem=problem)


def _answer_of(content: bytes) -> Answer:
    """Return the answer in a response; one that cannot be read is no loss."""
    try:
        partial = ExportMetricsServiceResponse.FromString(content).partial_success
    except DecodeError:
        return Answer(Result.SENT)
    return Answer(Result.SENT, max(0, partial.rejected_data_points), problem=_line(partial.error_message))


def _retry_after(text: str) -> float | None:
    """Return the seconds of a header that has a number or a date."""
    text = text.strip()
    if text.isdecimal() and len(text) < 10:
        return float(text)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None


def _send_grpc(endpoint: OtlpEndpoint, body: bytes) -> Answer:
    host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
    target = f"{host}:{endpoint.port}"
    # As over HTTP, no proxy is looked for.
    options = (("grpc.primary_user_agent", _USER_AGENT), ("grpc.enable_http_proxy", 0))
    compression = grpc.Compression.Gzip if endpoint.is_gzipped else grpc.Compression.NoCompression
    try:
        if endpoint.is_tls:
            channel = grpc.secure_channel(target, _credentials(endpoint), options, compression)
        else:
            channel = grpc.insecure_channel(target, options, compression)
        with channel:
            export = channel.unary_unary(_METHOD, request_serializer=bytes, response_deserializer=bytes)
            metadata = tuple((name.lower(), value) for name, value in endpoint.headers)
            return _answer_of(export(body, timeout=endpoint.timeout_seconds, metadata=metadata))
    except grpc.RpcError as error:
        code = error.code() if isinstance(error, grpc.Call) else grpc.StatusCode.UNKNOWN
        asked = _retry_info(error)
        # Exhausted for now if it says when to come back, and else for as long as the message is what it is.
        is_throttled = code is grpc.StatusCode.RESOURCE_EXHAUSTED and asked is not None
        result = Result.RETRY if is_throttled or code in _RETRYABLE_CODES else Result.REFUSED
        return Answer(result, 0, asked, f"gRPC {code.name}")
    except (OSError, ValueError) as error:
        return Answer(Result.RETRY, problem=_line(str(error)))


def _retry_info(error: grpc.RpcError) -> float | None:
    """Return the seconds of the `google.rpc.RetryInfo` in an error's details; None without one."""
    trailer: dict[str, bytes] = {}
    if isinstance(error, grpc.Call):
        trailer = {each.key: each.value for each in error.trailing_metadata() or ()}
    try:
        for detail in _messages(trailer.get(_DETAILS, b""), 3):
            packed = Any.FromString(detail)
            if packed.type_url == _RETRY_INFO:
                delays = map(Duration.FromString, _messages(packed.value, 1))
                return sum((each.ToTimedelta().total_seconds() for each in delays), 0.0)
    except (DecodeError, ValueError, OverflowError, TypeError):
        pass
    return None


def _messages(content: bytes, number: int) -> list[bytes]:
    """Return the messages in a field; no package that we need has the classes of `google.rpc`."""
    fields = UnknownFieldSet(Empty.FromString(content))
    found = [fields[index] for index in range(len(fields))]
    return [each.data for each in found if each.field_number == number]


def _credentials(endpoint: OtlpEndpoint) -> grpc.ChannelCredentials:
    tls = endpoint.tls
    authority, key, certificate = (
        path.read_bytes() if path is not None else None for path in (tls.authority, tls.key, tls.certificate)
    )
    return grpc.ssl_channel_credentials(authority, key, certificate)


def _line(text: str) -> str:
    return one_line(text, _MAX_PROBLEM)
