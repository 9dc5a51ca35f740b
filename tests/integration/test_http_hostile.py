"""Clients that mean harm, or are broken: others go on scraping, and the daemon's memory stays bounded."""

import contextlib
import http.client
import re
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.integration.web_tls import make_certificate
from tests.support.node import Node, eventually

from torchperfd_daemon.web.event_hub import MAX_OF_STRANGERS

# What a flood may cost beside the daemon itself; the pages and buffers of all connections that
# are let in come to less than a third of it.
MAX_EXTRA_BYTES = 48 << 20
SCRAPES = 20
GIVE_UP_S = 10


def resident_bytes(node: Node) -> int:
    assert node.daemon is not None
    status = Path(f"/proc/{node.daemon.pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found
    return int(found[1]) * 1024


def connect(node: Node) -> socket.socket:
    return socket.create_connection(("127.0.0.1", node.metrics_port), timeout=GIVE_UP_S)


@contextlib.contextmanager
def costing_little(node: Node) -> Iterator[None]:
    """Scrape others through what happens in the block; fail when that fails, or memory grew."""
    node.get("/metrics")
    before = resident_bytes(node)
    yield
    for _ in range(SCRAPES):
        code, page = node.get("/metrics")
        assert code == 200
        assert "torchperfd_build_info" in page
    assert resident_bytes(node) - before < MAX_EXTRA_BYTES
    assert node.daemon is not None
    assert node.daemon.poll() is None
    assert "Traceback" not in node.log()


def test_three_hundred_idle_connections(node: Node) -> None:
    node.start_daemon()
    with contextlib.ExitStack() as stack, costing_little(node):
        idle = [stack.enter_context(connect(node)) for _ in range(300)]
        # The first to come had to make room.
        assert idle[0].recv(1) == b""


def test_endless_requests_and_unread_answers_are_closed(node: Node) -> None:
    node.start_daemon()
    with contextlib.ExitStack() as stack, costing_little(node):
        for number in range(200):
            connection = stack.enter_context(connect(node))
            if number % 2:
                connection.sendall(b"GET /metrics HTTP/1.1\r\nhost: d\r\nx-slow: ")
            else:
                connection.sendall(b"GET /metrics HTTP/1.1\r\nhost: d\r\n\r\n" * 100)


def test_a_request_of_a_hundred_megabytes(node: Node) -> None:
    node.start_daemon()
    megabyte = bytes(1 << 20)

    def flood(head: bytes) -> bytes:
        with connect(node) as connection:
            connection.sendall(head)
            # The daemon hangs up long before the end.
            with contextlib.suppress(ConnectionError):
                for _ in range(100):
                    connection.sendall(megabyte)
            with contextlib.suppress(ConnectionError):
                return connection.recv(100)
        return b""

    with costing_little(node):
        body = b"POST /metrics HTTP/1.1\r\nhost: d\r\ncontent-length: 104857600\r\n\r\n"
        chunked = b"GET /metrics HTTP/1.1\r\nhost: d\r\ntransfer-encoding: chunked\r\n\r\n6400000\r\n"
        for head in (body, chunked, b"GET /", b"GET / HTTP/1.1\r\nx: "):
            # An answer may be lost when the connection is reset, and then it is none.
            assert b" 200 " not in flood(head)
        with connect(node) as connection:
            connection.sendall(body)
            assert connection.recv(100).startswith(b"HTTP/1.1 413 ")


def test_scrapes_every_ten_milliseconds_leave_room_for_others(node: Node) -> None:
    node.start_daemon()
    stop = threading.Event()
    pages = 0

    def hurry() -> None:
        nonlocal pages
        connection = http.client.HTTPConnection("127.0.0.1", node.metrics_port, timeout=GIVE_UP_S)
        with contextlib.closing(connection):
            while not stop.wait(0.01):
                connection.request("GET", "/metrics")
                assert connection.getresponse().read()
                pages += 1

    thread = threading.Thread(target=hurry)
    with costing_little(node):
        thread.start()
        try:
            eventually(lambda: pages >= 200, GIVE_UP_S * 3)
            assert node.get("/-/ready")[0] == 200
        finally:
            stop.set()
            thread.join()


@pytest.fixture
def tls(node: Node) -> Callable[[], http.client.HTTPSConnection]:
    """Start a daemon that speaks TLS; return what makes a connection to it."""
    certificate, key = make_certificate(node.directory)
    config = node.directory / "web.yml"
    config.write_text(f"tls_server_config:\n  cert_file: {certificate.name}\n  key_file: {key.name}\n")
    node.start_daemon("--web.config.file", str(config), wait=False)
    context = ssl.create_default_context(cafile=certificate)

    def connection() -> http.client.HTTPSConnection:
        return http.client.HTTPSConnection("127.0.0.1", node.metrics_port, timeout=GIVE_UP_S, context=context)

    eventually(lambda: fetch(connection, "/-/ready") == 200, 20, node.log)
    return connection


def fetch(connect_to: Callable[[], http.client.HTTPSConnection], path: str) -> int:
    with contextlib.closing(connect_to()) as connection:
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            answer.read()
        except OSError:
            return 0
        return answer.status


@pytest.mark.needs("openssl")
def test_handshakes_that_are_never_finished(
    node: Node, tls: Callable[[], http.client.HTTPSConnection]
) -> None:
    def flood(connections: int) -> int:
        """Begin so many handshakes while others scrape; return the most memory used by now."""
        with contextlib.ExitStack() as stack:
            for number in range(connections):
                connection = stack.enter_context(connect(node))
                if number % 2:
                    # The beginning of a record that says it will be long.
                    connection.sendall(b"\x16\x03\x01\x02\x00\x01")
            assert [fetch(tls, "/metrics") for _ in range(SCRAPES)] == [200] * SCRAPES
        return resident_bytes(node)

    # Those that are let in have a quarter of a megabyte of buffers each; more of them cost no more. Twice:
    # the first time, not all that may be let in need to be there at the same moment.
    flood(300)
    after_some = flood(300)
    assert flood(900) - after_some < MAX_EXTRA_BYTES // 2
    assert "Traceback" not in node.log()


@pytest.mark.needs("openssl")
def test_a_new_certificate_is_used_and_a_broken_one_is_not(
    node: Node, tls: Callable[[], http.client.HTTPSConnection]
) -> None:
    def served() -> str:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with connect(node) as plain, context.wrap_socket(plain) as connection:
            certificate = connection.getpeercert(binary_form=True)
        assert certificate
        return ssl.DER_cert_to_PEM_cert(certificate)

    path = node.directory / "server.pem"
    first = path.read_text()
    assert served() == first
    path.write_text("no certificate")
    assert fetch(tls, "/metrics") == 200
    assert "cannot be used" in node.log()
    other, key = make_certificate(node.directory, "other")
    key.replace(node.directory / "server.key")
    other.replace(path)
    eventually(lambda: served() == path.read_text() != first, 20, node.log)


@pytest.mark.needs("openssl")
def test_client_without_tls_gets_nothing(node: Node, tls: Callable[[], http.client.HTTPSConnection]) -> None:
    assert node.get("/metrics") == (0, "")
    assert fetch(tls, "/metrics") == 200


@pytest.mark.parametrize(
    "text",
    [
        "basic_auth_users: {ada: plain}",
        "tls_server_config: {cert_file: none.pem, key_file: none.key}",
        "tls_server_config: {",
        "tls: {}",
    ],
)
def test_a_web_configuration_that_cannot_be_used_is_one_line(node: Node, text: str) -> None:
    config = node.directory / "web.yml"
    config.write_text(text)
    refused = node.command("serve", "--metrics-address", "127.0.0.1:0", "--web.config.file", str(config))
    assert (refused.returncode, refused.stdout, refused.stderr.count("\n")) == (2, "", 1)
    assert str(config) in refused.stderr
    assert "; " in refused.stderr


def read_until(connection: socket.socket, end: bytes) -> bool:
    """Read up to the end of an answer; False if the connection ends before it."""
    read = b""
    while not read.endswith(end):
        if not (piece := connection.recv(65536)):
            return False
        read += piece
    return True


def test_streams_that_are_not_read_and_bodies_that_do_not_end(node: Node) -> None:
    node.start_daemon()
    with contextlib.ExitStack() as stack, costing_little(node):
        streams = [stack.enter_context(connect(node)) for _ in range(40)]
        for stream in streams:
            stream.sendall(b"GET /api/v1/events HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert stream.recv(12) == b"HTTP/1.1 200"
        # The oldest give way, so that only the newest few last.
        for stream in streams[: 40 - MAX_OF_STRANGERS]:
            assert read_until(stream, b"\r\n0\r\n\r\n")
        for stream in streams[40 - MAX_OF_STRANGERS :]:
            stream.settimeout(0.2)
            with pytest.raises(TimeoutError):
                read_until(stream, b"\r\n0\r\n\r\n")
        for _ in range(100):
            connection = stack.enter_context(connect(node))
            connection.sendall(
                b"POST /api/v1/runs/a/capture HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9000\r\n\r\n{"
            )
