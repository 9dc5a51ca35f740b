"""An HTTP server that gives the answers of a script, and keeps what it was sent."""

import ssl
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Self


@dataclass(frozen=True)
class Reply:
    """An answer."""

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Received:
    """A request; its headers have names in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


class ScriptedServer:
    """Serves on a free port of loopback, as a context manager.

    Args:
        replies: Its answers in their order; the last one is that to all later requests.
        certificate: Files of certificate and key, for TLS.

    Attributes:
        received: The requests so far.
    """

    def __init__(
        self, replies: Sequence[Reply] = (Reply(),), certificate: tuple[Path, Path] | None = None
    ) -> None:
        self.replies = list(replies)
        self.received: list[Received] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                size = int(self.headers.get("Content-Length", "0"))
                headers = {name.lower(): value for name, value in self.headers.items()}
                server.received.append(Received("POST", self.path, headers, self.rfile.read(size)))
                reply = server.replies.pop(0) if len(server.replies) > 1 else server.replies[0]
                self.send_response(reply.status)
                for name, value in {"Content-Length": str(len(reply.body)), **reply.headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(reply.body)

            def log_message(self, *_: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = False

            def handle_error(self, *_: object) -> None:
                """A client that ends a handshake is nothing to print."""

        self._server = Server(("127.0.0.1", 0), Handler)
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*certificate)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        scheme = "http" if certificate is None else "https"
        self.port: int = self._server.server_address[1]
        self.url = f"{scheme}://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
