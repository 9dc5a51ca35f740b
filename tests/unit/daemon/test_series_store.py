"""Queries of a store of series: every wrong server, refusal and partial answer is named, and bounded."""

import base64
import contextlib
import gzip
import json
import ssl
import threading
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.node import free_port
from tests.unit.daemon.fleet_nodes import certificates

from torchperfd_daemon.errors import (
    DaemonUnreachableError,
    DeadlineError,
    NoSuchTargetError,
    NotAllowedError,
    TorchperfdError,
    UsageError,
)
from torchperfd_daemon.fleet import series_store
from torchperfd_daemon.fleet.addresses import Address
from torchperfd_daemon.fleet.series import read_series
from torchperfd_daemon.fleet.series_store import SeriesStore, StoreSettings

EMPTY = {"status": "success", "data": {"resultType": "vector", "result": []}}


def vector(*rows: tuple[dict[str, str], str], **more: Any) -> dict[str, Any]:
    """Return an answer with these series."""
    result = [{"metric": labels, "value": [1_700_000_000.5, value]} for labels, value in rows]
    return {"status": "success", "data": {"resultType": "vector", "result": result}, **more}


class Answering(BaseHTTPRequestHandler):
    """Answers every request alike, and keeps its path, authorization and body."""

    timeout = 5

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        seen = (self.path, self.headers.get("Authorization"), self.rfile.read(length).decode())
        self.server.seen.append(seen)  # type: ignore[attr-defined]
        status, body = self.server.answer  # type: ignore[attr-defined]
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def answering(
    answer: object,
    status: int = HTTPStatus.OK,
    tls: ssl.SSLContext | None = None,
    handler: type[Answering] = Answering,
) -> Iterator[tuple[int, list[tuple[str, str | None, str]]]]:
    """Serve an answer; yield the port, and what was asked."""
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        seen: list[tuple[str, str | None, str]] = []
        body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        server.answer, server.seen = (status, body), seen  # type: ignore[attr-defined]
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server.server_address[1], seen
        finally:
            server.shutdown()
            thread.join()


def store(port: int, path: str = "", **more: Any) -> SeriesStore:
    return SeriesStore(StoreSettings(f"http://127.0.0.1:{port}{path}", **more))


def test_query_returns_labels_and_finite_values() -> None:
    rows = [({"run": "a", "rank": "0"}, "0.25"), ({"run": "b"}, "NaN"), ({"run": "c"}, "odd")]
    with answering(vector(*rows)) as (port, seen):
        assert store(port, "/prometheus/").query("up{x='1'}").rows == [({"run": "a", "rank": "0"}, 0.25)]
    [(path, authorization, body)] = seen
    assert (path, authorization) == ("/prometheus/api/v1/query", None)
    assert body.startswith("query=up%7Bx%3D%271%27%7D&")


def test_labels_are_cleaned_of_control_characters() -> None:
    with answering(vector(({"run": "a\x1b[2J" + "x" * 500}, "1"))) as (port, _):
        [(labels, _)] = store(port).query("up").rows
    assert labels["run"].isprintable()
    assert len(labels["run"]) == 200


@pytest.mark.parametrize(
    "more", [{"warnings": ["store-2 is down"]}, {"isPartial": True}], ids=["thanos", "victoria"]
)
def test_answer_that_is_partial_is_kept_with_the_reason(more: dict[str, Any]) -> None:
    with answering(vector(({}, "1"), **more)) as (port, _):
        answer = store(port).query("up")
    assert len(answer.rows) == 1
    assert answer.partial


ERROR = {"status": "error", "errorType": "bad_data", "error": "parse\nerror"}


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (401, b"", NotAllowedError),
        (403, b"", NotAllowedError),
        (503, b"", DaemonUnreachableError),
        (429, b"", DaemonUnreachableError),
        (302, b"", TorchperfdError),
        (404, b"<html>", TorchperfdError),
        (200, b"<html>", TorchperfdError),
        (
            200,
            b'{"status": "success", "data": {"resultType": "scalar", "result": [1, "1"]}}',
            TorchperfdError,
        ),
        (200, b'{"status": "success", "data": {"resultType": "vector", "result": [1]}}', TorchperfdError),
        (400, json.dumps(ERROR).encode(), TorchperfdError),
        (422, json.dumps(ERROR).encode(), TorchperfdError),
    ],
)
def test_answers_without_a_result_are_errors(status: int, body: bytes, error: type[TorchperfdError]) -> None:
    with answering(body, status) as (port, _), pytest.raises(TorchperfdError) as raised:
        store(port).query("up")
    assert type(raised.value) is error
    assert f"127.0.0.1:{port}" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_store_that_does_not_listen_is_unreachable() -> None:
    with pytest.raises(DaemonUnreachableError) as raised:
        store(free_port()).query("up")
    assert raised.value.exit_code == 4


def test_store_without_our_series_is_named() -> None:
    with answering(EMPTY) as (port, _), pytest.raises(NoSuchTargetError) as raised:
        read_series(store(port))
    assert f"127.0.0.1:{port}" in str(raised.value)


def test_answer_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(series_store, "MAX_SECONDS", 0.2)
    done = threading.Event()

    class Dripping(Answering):
        def do_POST(self) -> None:
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):
                while not done.wait(0.02):
                    self.wfile.write(b" ")

    with HTTPServer(("127.0.0.1", 0), Dripping) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        with pytest.raises(DeadlineError):
            store(server.server_address[1]).query("up")
        done.set()
        thread.join()


def test_answer_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(series_store, "MAX_ANSWER_BYTES", 100)
    with answering(b" " * 101) as (port, _), pytest.raises(TorchperfdError, match="100 bytes"):
        store(port).query("up")


class Compressing(Answering):
    """Answers in gzip if that is accepted."""

    def do_POST(self) -> None:
        status, body = self.server.answer  # type: ignore[attr-defined]
        self.rfile.read(int(self.headers["Content-Length"]))
        accepted = self.headers.get("Accept-Encoding")
        is_accepted = accepted == "gzip"
        sent = gzip.compress(body) if is_accepted and body != DAMAGED else body
        self.server.seen.append((self.path, accepted, ""))  # type: ignore[attr-defined]
        self.send_response(status)
        if is_accepted:
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(sent)))
        self.end_headers()
        self.wfile.write(sent)


DAMAGED = b"no gzip"


@pytest.mark.parametrize("is_near", [True, False])
def test_answers_from_elsewhere_are_compressed(is_near: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Address, "is_loopback", property(lambda _: is_near))
    with answering(vector(({"rank": "0"}, "1.5")), handler=Compressing) as (port, seen):
        found = SeriesStore(StoreSettings(f"http://127.0.0.1:{port}")).query("up")
    assert found.rows == [({"rank": "0"}, 1.5)]
    assert [accepted for _, accepted, _ in seen] == ["identity" if is_near else "gzip"]


@pytest.mark.parametrize("body", [DAMAGED, b" " * 5000])
def test_compressed_answers_are_checked_and_bounded(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Address, "is_loopback", property(lambda _: False))
    monkeypatch.setattr(series_store, "MAX_ANSWER_BYTES", 1000)
    words = "its answer is damaged" if body == DAMAGED else "more than 1,000 bytes"
    with (
        answering(body, handler=Compressing) as (port, _),
        pytest.raises(TorchperfdError, match=words),
    ):
        SeriesStore(StoreSettings(f"http://127.0.0.1:{port}")).query("up")


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    file = tmp_path / "secret"
    file.write_text("s3cret\n")
    file.chmod(0o600)
    return file


def test_secret_is_a_token_or_the_password_of_a_user(secret: Path) -> None:
    with answering(EMPTY) as (port, seen):
        store(port, secret_file=secret).query("up")
        SeriesStore(StoreSettings(f"http://ad%20a@127.0.0.1:{port}", secret)).query("up")
    basic = base64.b64encode(b"ad a:s3cret").decode()
    assert [authorization for _, authorization, _ in seen] == ["Bearer s3cret", f"Basic {basic}"]


def test_store_of_tenants_answers_with_its_header_only() -> None:
    class OfTenants(Answering):
        def do_POST(self) -> None:
            if self.headers.get("X-Scope-OrgID") == "team-a":
                super().do_POST()
            else:
                self.send_error(HTTPStatus.UNAUTHORIZED, "no org id")

    with answering(vector(({}, "1")), handler=OfTenants) as (port, seen):
        url = f"http://127.0.0.1:{port}"
        for tenant in (None, "team-b"):
            with pytest.raises(NotAllowedError, match="--prometheus-tenant"):
                SeriesStore(StoreSettings(url, tenant=tenant)).query("up")
        assert SeriesStore(StoreSettings(url, tenant="team-a")).query("up").rows == [({}, 1.0)]
    assert len(seen) == 1


@pytest.mark.parametrize("tenant", ["", "a b", "a\r\nHost: b", "é"])
def test_text_that_names_no_tenant_is_refused(tenant: str) -> None:
    with pytest.raises(UsageError, match="tenant"):
        SeriesStore(StoreSettings("http://127.0.0.1:9090", tenant=tenant))


def test_secret_that_others_can_read_is_refused(secret: Path) -> None:
    secret.chmod(0o644)
    with pytest.raises(TorchperfdError, match="chmod 600"):
        store(9090, secret_file=secret)


@pytest.mark.parametrize(
    "url",
    [
        "http://prometheus:9090",  # in clear text, with a secret
        "http://ada:pass@127.0.0.1:9090",
        "127.0.0.1:9090",
        "ftp://127.0.0.1",
        "http://",
        "http://127.0.0.1:9090?a=b",
        "http://127.0.0.1:99999",
        "http://127.0.0.1:9090/a b",
    ],
)
def test_urls_that_cannot_be_used_are_refused(url: str, secret: Path) -> None:
    with pytest.raises(UsageError) as raised:
        SeriesStore(StoreSettings(url, secret))
    assert "pass@" not in str(raised.value)


def test_user_without_a_secret_is_refused() -> None:
    with pytest.raises(UsageError, match="--prometheus-secret-file"):
        SeriesStore(StoreSettings("https://ada@prometheus"))


@pytest.mark.needs("openssl")
def test_tls_trusts_the_given_authority_only(tmp_path: Path, secret: Path) -> None:
    certificates(tmp_path, "ours")
    certificates(tmp_path, "other")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "ours" / "node.pem", tmp_path / "ours" / "node.key")
    with answering(EMPTY, tls=context) as (port, seen):
        url = f"https://127.0.0.1:{port}"
        assert SeriesStore(StoreSettings(url, secret, tmp_path / "ours" / "ca.pem")).query("up").rows == []
        with pytest.raises(DaemonUnreachableError, match="certificate"):
            SeriesStore(StoreSettings(url, secret, tmp_path / "other" / "ca.pem")).query("up")
    assert [authorization for _, authorization, _ in seen] == ["Bearer s3cret"]


LABELS = st.dictionaries(
    st.sampled_from(["run", "rank", "instance", "node", "cause", "phase", "part", "name", "blamed_rank"]),
    st.text(max_size=8) | st.integers(0, 9).map(str),
)


@settings(max_examples=25)
@given(rows=st.lists(st.tuples(LABELS, st.floats().map(str) | st.text(max_size=5)), max_size=6))
def test_any_series_are_read_without_a_crash(rows: list[tuple[dict[str, str], str]]) -> None:
    with answering(vector(({"run": "a", "instance": "i"}, "1"), *rows)) as (port, _):
        series = read_series(store(port), with_status=True)
    assert "a" in series.runs
