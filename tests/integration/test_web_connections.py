"""The HTTP server in this process: what a closed connection held is free at once."""

import asyncio
import contextlib
import gc
import socket
import ssl
import struct
from asyncio import sslproto
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from tests.integration.web_tls import make_certificate
from uvicorn.protocols.http.h11_impl import H11Protocol

from torchperfd_daemon.web.config_file import WebConfigFile
from torchperfd_daemon.web.server import MAX_CONNECTIONS, WebServer

PATIENCE_S: Final = 10
REQUEST: Final = b"GET / HTTP/1.1\r\nhost: d\r\n\r\n"
LONG_RECORD: Final = b"\x16\x03\x01\x02\x00\x01"
"""The beginning of a handshake that says that 512 bytes follow."""

Client = Callable[[int, bool], None]


async def answer(scope: Any, receive: Any, send: Any) -> None:
    """The ASGI application: an empty page."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


def connect(port: int, tls: bool) -> socket.socket:
    plain = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
    if not tls:
        return plain
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context.wrap_socket(plain)


def request(port: int, tls: bool) -> socket.socket:
    connection = connect(port, tls)
    connection.sendall(REQUEST)
    assert connection.recv(100).startswith(b"HTTP/1.1 200 ")
    return connection


def close_after_response(port: int, tls: bool) -> None:
    request(port, tls).close()


def reset_after_response(port: int, tls: bool) -> None:
    connection = request(port, tls)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def close_within_request(port: int, tls: bool) -> None:
    with connect(port, tls) as connection:
        connection.sendall(REQUEST[:10])


def close_within_handshake(port: int, tls: bool) -> None:
    with connect(port, tls=False) as connection:
        connection.sendall(LONG_RECORD)


def send_no_handshake(port: int, tls: bool) -> None:
    with connect(port, tls=False) as connection:
        connection.sendall(REQUEST)
        connection.recv(100)


def hold_more_than_are_let_in(port: int, tls: bool) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(MAX_CONNECTIONS + 20):
            stack.enter_context(connect(port, tls=False)).sendall(LONG_RECORD)


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def left(kind: type) -> list[object]:
    return [held for held in gc.get_objects() if isinstance(held, kind)]


def leaves_none(kind: type, client: Client, web_config: WebConfigFile | None) -> None:
    """Serve a client HTTP, with TLS if configured; then no object of the kind is left."""

    async def serve() -> None:
        with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
            server = WebServer(answer, web_config)
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            await asyncio.to_thread(client, listener.getsockname()[1], web_config is not None)
            for _ in range(PATIENCE_S * 20):
                if not left(kind):
                    break
                await asyncio.sleep(0.05)
            server.leave()
            await serving
            assert left(kind) == []

    asyncio.run(serve())


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("client", [close_after_response, reset_after_response, close_within_request])
def test_a_closed_connection_is_freed_at_once(client: Client) -> None:
    leaves_none(H11Protocol, client, web_config=None)


@pytest.mark.needs("openssl")
@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize(
    "client",
    [
        close_after_response,
        reset_after_response,
        close_within_request,
        close_within_handshake,
        send_no_handshake,
        hold_more_than_are_let_in,
    ],
)
def test_a_closed_tls_connection_is_freed_at_once(client: Client, tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    config = tmp_path / "web.yml"
    config.write_text(f"tls_server_config:\n  cert_file: {certificate.name}\n  key_file: {key.name}\n")
    leaves_none(sslproto.SSLProtocol, client, WebConfigFile(config))
