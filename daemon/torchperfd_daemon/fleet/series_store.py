"""Queries a store of series: Prometheus, or Thanos, Mimir or VictoriaMetrics by the same HTTP interface.

Only instant queries are made, each bounded in time and size. The answers are another machine's: all labels
are cleaned of control characters before anything else sees them.
"""

import base64
import concurrent.futures
import contextlib
import http.client
import math
import re
import socket
import ssl
import threading
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import SplitResult, unquote, urlencode, urlsplit

import msgspec

from torchperfd.model.formatting import one_line
from torchperfd_daemon.errors import (
    DaemonUnreachableError,
    DeadlineError,
    NotAllowedError,
    TorchperfdError,
    UsageError,
)
from torchperfd_daemon.fleet.addresses import Address
from torchperfd_daemon.fleet.secret_files import read_file

MAX_SECONDS: Final = 10.0
"""The time limit of a query, and of a connection."""
MAX_ANSWER_BYTES: Final = 64 * 2**20
"""A hundred thousand series take 15 MB."""
MAX_AT_ONCE: Final = 4
_GZIP: Final = 16 + zlib.MAX_WBITS
_MAX_LABEL: Final = 200
_MAX_REASON: Final = 200
_PATH: Final = "/api/v1/query"
_REMEDY: Final = "check --prometheus-secret-file, --prometheus-ca-file and --prometheus-tenant"
_TENANT: Final = re.compile(r"[!-~]{1,300}")
_UNAVAILABLE: Final = (
    http.client.TOO_MANY_REQUESTS,
    http.client.BAD_GATEWAY,
    http.client.SERVICE_UNAVAILABLE,
    http.client.GATEWAY_TIMEOUT,
)


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """Where the store is, and how to authenticate.

    Attributes:
        url: What comes before ``/api/v1``; may contain a user, whose password is the secret.
        secret_file: A bearer token, or that password.
        ca_file: The certificate authority of the store, in PEM; those of the system without one.
        tenant: Whose series are asked for, in a store that separates tenants; None in others.
    """

    url: str
    secret_file: Path | None = None
    ca_file: Path | None = None
    tenant: str | None = None


class Sample(msgspec.Struct, gc=False):
    """One series of an answer: its labels, and its value as text."""

    metric: dict[str, str]
    value: tuple[float, str]


class _Data(msgspec.Struct):
    resultType: str = ""  # noqa: N815 - the interface's name
    result: msgspec.Raw = msgspec.Raw(b"[]")


class _Answer(msgspec.Struct):
    status: str
    data: _Data = msgspec.field(default_factory=_Data)
    error: str = ""
    warnings: list[str] = []
    isPartial: bool = False  # noqa: N815 - VictoriaMetrics' name


@dataclass(slots=True)
class Vector:
    """The answer to one query.

    Attributes:
        rows: The labels and value of each series, without those whose value is no finite number.
        partial: Why some series may be missing; empty if none are.
    """

    rows: list[tuple[Mapping[str, str], float]] = field(default_factory=list)
    partial: str = ""


class SeriesStore:
    """A store that answers PromQL.

    Raises:
        UsageError: The URL or tenant cannot be used, or a secret would be sent in clear text.
        TorchperfdError: A file of credentials cannot be used.
    """

    def __init__(self, settings: StoreSettings) -> None:
        self._parts = _checked_url(settings.url)
        self.address = f"{self._parts.hostname}:{self._port}"
        """Host and port, without the user."""
        self._headers = {"Content-Type": "application/x-www-form-urlencoded", "Accept": "application/json"}
        if not Address(self._parts.hostname or "", self._port).is_loopback:
            # A thirtieth of the bytes, for a quarter more of the store's CPU time at most.
            self._headers["Accept-Encoding"] = "gzip"
        if settings.secret_file is not None or self._parts.username is not None:
            self._headers["Authorization"] = self._authorization(settings.secret_file)
        if settings.tenant is not None:
            if not _TENANT.fullmatch(settings.tenant):
                raise UsageError("--prometheus-tenant is no name of a tenant", "write it like team-a")
            self._headers["X-Scope-OrgID"] = settings.tenant
        self._tls: ssl.SSLContext | None = None
        if self._parts.scheme == "https":
            self._tls = _tls_context(settings.ca_file)
        self._decoder = msgspec.json.Decoder(_Answer)
        self._rows = msgspec.json.Decoder(list[Sample])

    @property
    def _port(self) -> int:
        return self._parts.port or (443 if self._parts.scheme == "https" else 80)

    def query_all(self, expressions: Sequence[str]) -> list[Vector]:
        """Return the answers to several instant queries, made at the same time.

        Raises:
            DaemonUnreachableError: The store does not answer, or is overloaded.
            DeadlineError: It takes too long.
            NotAllowedError: It refuses the credentials.
            TorchperfdError: It is no such store, or rejects a query.
        """
        if len(expressions) == 1:
            return [self.query(expressions[0])]
        with concurrent.futures.ThreadPoolExecutor(min(MAX_AT_ONCE, len(expressions))) as pool:
            return [*pool.map(self.query, expressions)]

    def query(self, expression: str) -> Vector:
        """Return the answer to an instant query; raises as :meth:`query_all`."""
        body = self._post(urlencode({"query": expression, "timeout": f"{MAX_SECONDS:.0f}s"}))
        try:
            answer = self._decoder.decode(body)
            if answer.status != "success":
                raise TorchperfdError(f"{self.address} rejects a query: {_reason(answer.error)}")
            if answer.data.resultType != "vector":
                raise self._no_store("no vector in its answer")
            samples = self._rows.decode(answer.data.result)
        except msgspec.DecodeError as error:
            raise self._no_store("its answer is no JSON of that interface") from error
        partial = "; ".join(map(_reason, answer.warnings[:3]))
        if answer.isPartial:
            partial = partial or "some of its storage did not answer"
        return Vector([row for sample in samples if (row := _row(sample))], partial)

    def _post(self, form: str) -> bytes:
        host, port = self._parts.hostname or "", self._port
        connection = (
            http.client.HTTPConnection(host, port, timeout=MAX_SECONDS)
            if self._tls is None
            else http.client.HTTPSConnection(host, port, timeout=MAX_SECONDS, context=self._tls)
        )
        try:
            connection.connect()
        except (OSError, ValueError) as error:
            # A host that no DNS could have is a ValueError.
            why = getattr(error, "strerror", None) or str(error) or "timed out"
            raise DaemonUnreachableError(
                f"no answer from {self.address}: {why}", "check --prometheus"
            ) from error
        # A server that sends a byte now and then would never reach the socket's own limit.
        deadline = threading.Timer(MAX_SECONDS, _hang_up, (connection.sock,))
        deadline.start()
        began = time.monotonic()
        try:
            connection.request("POST", self._parts.path.rstrip("/") + _PATH, form, self._headers)
            answer = connection.getresponse()
            body = answer.read(MAX_ANSWER_BYTES + 1)
            if answer.getheader("Content-Encoding") == "gzip":
                body = zlib.decompressobj(_GZIP).decompress(body, MAX_ANSWER_BYTES + 1)
        except zlib.error as error:
            raise self._no_store("its answer is damaged") from error
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, TimeoutError) or time.monotonic() - began >= MAX_SECONDS:
                raise self._too_slow() from error
            raise DaemonUnreachableError(
                f"no answer from {self.address}: it has ended the connection", "check --prometheus"
            ) from error
        finally:
            deadline.cancel()
            connection.close()
        if time.monotonic() - began >= MAX_SECONDS:
            raise self._too_slow()
        self._check(answer.status, answer.reason, body)
        return body

    def _too_slow(self) -> DeadlineError:
        return DeadlineError(f"no answer from {self.address} within {MAX_SECONDS:.0f} s", "choose a --run")

    def _check(self, status: int, reason: str, body: bytes) -> None:
        """Refuse an answer that has no result, as :meth:`query_all` says."""
        if len(body) > MAX_ANSWER_BYTES:
            raise TorchperfdError(
                f"the answer of {self.address} has more than {MAX_ANSWER_BYTES:,} bytes", "choose a --run"
            )
        said = f"{status} {one_line(reason, _MAX_REASON)}"
        if status in (http.client.UNAUTHORIZED, http.client.FORBIDDEN):
            raise NotAllowedError(f"{self.address} refuses access: {said}", _REMEDY)
        if status in _UNAVAILABLE:
            raise DaemonUnreachableError(f"{self.address} cannot answer now: {said}", "try again")
        if status in (http.client.BAD_REQUEST, http.client.UNPROCESSABLE_ENTITY) and body[:1] == b"{":
            return  # The error is in the body.
        if status != http.client.OK:
            raise self._no_store(f"it answers {said}")

    def _no_store(self, why: str) -> TorchperfdError:
        return TorchperfdError(
            f"{self.address} does not answer PromQL at {self._parts.path.rstrip('/')}{_PATH}: {why}",
            "give the URL that Grafana has, such as https://mimir/prometheus",
        )

    def _authorization(self, secret_file: Path | None) -> str:
        is_loopback = Address(self._parts.hostname or "", self._port).is_loopback
        if self._parts.scheme != "https" and not is_loopback:
            raise UsageError(
                f"the secret for {self.address} would be sent unencrypted", "use an https:// URL"
            )
        if secret_file is None:
            raise UsageError(
                f"there is no password for user {self._parts.username}", "give --prometheus-secret-file"
            )
        secret = read_file(secret_file, _REMEDY, secret=True).strip()
        if not secret or b"\n" in secret or not secret.isascii():
            raise UsageError(f"{secret_file} has no secret on one line", _REMEDY)
        if self._parts.username is None:
            return f"Bearer {secret.decode()}"
        pair = unquote(self._parts.username).encode() + b":" + secret
        return f"Basic {base64.b64encode(pair).decode()}"


def _checked_url(url: str) -> SplitResult:
    """Return the parts of a URL.

    Raises:
        UsageError: It is no URL of http or https with a host, or contains a password, a query or a fragment.
    """
    remedy = "write it like http://prometheus:9090"
    try:
        parts = urlsplit(url)
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_usable = False
    if not is_usable or not url.isascii() or not url.isprintable() or " " in url:
        raise UsageError("--prometheus is no URL of http or https", remedy)
    if parts.password is not None:
        raise UsageError("--prometheus contains a password, which other users can see", _REMEDY)
    if parts.query or parts.fragment:
        raise UsageError("--prometheus has a query or a fragment", remedy)
    return parts


def _tls_context(ca_file: Path | None) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if ca_file is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            context.load_verify_locations(cadata=read_file(ca_file, _REMEDY).decode("ascii"))
        except (OSError, ValueError) as error:
            raise UsageError(f"{ca_file} contains no certificate", _REMEDY) from error
    return context


def _hang_up(connected: socket.socket) -> None:
    with contextlib.suppress(OSError):
        # Of the TCP connection alone, whatever TLS is doing on its own thread.
        socket.socket.shutdown(connected, socket.SHUT_RDWR)


def _reason(text: str) -> str:
    return one_line(text, _MAX_REASON) or "no reason given"


def _row(sample: Sample) -> tuple[Mapping[str, str], float] | None:
    try:
        value = float(sample.value[1])
    except ValueError:
        return None
    if not math.isfinite(value):
        return None
    for name, text in sample.metric.items():
        if not text.isprintable() or len(text) > _MAX_LABEL:
            sample.metric[name] = one_line(text, _MAX_LABEL)
    return sample.metric, value
