"""Serves the live page and made-up documents, as the daemon does, for tests and benchmarks of the page."""

import contextlib
import json
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any, Final
from urllib.parse import parse_qs, unquote, urlsplit

from tests.support.page_feed import PageFeed

TOKEN: Final = "right-token"
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self';"
    " connect-src 'self'; manifest-src 'self'; worker-src 'self'; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'"
)
_TYPES: Final = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


class _Server(ThreadingHTTPServer):
    daemon_threads = False
    allow_reuse_address = True

    def __init__(self, feed: PageFeed, port: int) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.feed = feed
        self.stops = threading.Event()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Leave out what a browser does that goes to another page."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    # One request a connection, so that no thread waits for the next one.
    protocol_version = "HTTP/1.0"
    # Connections that a browser opens in advance send nothing.
    timeout = 2

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        path, query = urlsplit(self.path).path, parse_qs(urlsplit(self.path).query)
        if path.startswith("/api/v1/"):
            self._read([unquote(part) for part in path.removeprefix("/api/v1/").split("/")], query)
            return
        name = path.removeprefix("/assets/") if path.startswith("/assets/") else "index.html"
        asset = files("torchperfd_daemon.web").joinpath("assets", name)
        if asset.is_file():
            self._answer(200, asset.read_bytes(), _TYPES[name.rsplit(".", 1)[-1]])
        else:
            self._refuse(404, "no such file")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or b"{}")
        if self.headers.get("x-torchperfd-token") != TOKEN:
            self._refuse(401, "a token is needed")
            return
        if self.path.endswith("/capture"):
            feed = self.server.feed
            ranks = [
                {"rank": rank, "state": "armed", "reason": "", "steps_made": 0}
                for rank in body.get("ranks", range(feed.ranks))
            ]
            made = {
                "capture_id": f"20261127-2300{len(feed.captures):02}-abc",
                "run": feed.run,
                "state": "armed",
                "ranks": ranks,
                "options": {"steps": body["steps"]},
                "requested_at": time.time(),
                "trigger": "command",
            }
            feed.captures.insert(0, made)
            self._document(made, 202)
        elif "/comparison/" in self.path:
            self._document({"state": "ready", "url": f"/links/{self.path.split('/captures/')[1]}"})
        else:
            self._refuse(404, "no such path")

    def _read(self, parts: list[str], query: dict[str, list[str]]) -> None:
        feed = self.server.feed
        given = self.headers.get("x-torchperfd-token")
        if given not in (None, TOKEN):
            self._refuse(401, "wrong token")
            return
        fleet = "fleet" in query
        match parts:
            case ["info"]:
                self._document(feed.info())
            case ["runs"]:
                self._document(feed.runs(fleet))
            case ["runs", name] if name == feed.run:
                self._document(feed.run_document(fleet))
            case ["runs", name, _] if name == feed.run and feed.forgotten:
                self._refuse(404, f"no run {name} on this node")
            case ["runs", name, "ranks"] if name == feed.run:
                self._document(feed.ranks_document())
            case ["runs", name, "history"] if name == feed.run:
                ranks = [int(rank) for rank in query["ranks"][0].split(",")] if "ranks" in query else None
                self._document(feed.history(ranks))
            case ["runs", name, "goodput"] if name == feed.run:
                self._document(feed.goodput())
            case ["captures"]:
                self._document(feed.captures_document())
            case ["captures", capture]:
                found = [each for each in feed.captures if each["capture_id"] == capture]
                self._document({"schema": "torchperfd.capture/1", **found[0]}) if found else self._refuse(
                    404, f"no capture {capture!r}"
                )
            case ["node"]:
                self._document(feed.node())
            case ["events"]:
                feed.streams += 1
                self._events(query)
                feed.streams -= 1
            case _:
                self._refuse(404, f"no run {parts[-1]} on this node")

    def _events(self, query: dict[str, list[str]]) -> None:
        feed = self.server.feed
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        number, state = 3000, feed.state
        with contextlib.suppress(OSError):
            self._event("hello", {"api": 1, "node": "vm", "instance": str(id(self.server))})
            while not self.server.stops.wait(1):
                if feed.state != state:
                    state = feed.state
                    self._event("run", {"run": feed.run, "state": state, "ranks": []})
                if "run" in query and not feed.has_ended:
                    live = [rank for rank in range(min(64, feed.ranks)) if rank not in feed.silent]
                    rows = [{"rank": rank, **feed.steps(rank, number, 4)} for rank in live]
                    self._event("steps", {"run": feed.run, "ranks": rows})
                    number += 4

    def _event(self, name: str, data: object) -> None:
        self.wfile.write(f"event: {name}\ndata: {json.dumps(data)}\n\n".encode())
        self.wfile.flush()

    def _document(self, document: dict[str, Any], status: int = 200) -> None:
        self._answer(status, json.dumps(document).encode(), "application/json")

    def _refuse(self, status: int, problem: str) -> None:
        self._answer(
            status, json.dumps({"error": {"problem": problem, "remedy": ""}}).encode(), "application/json"
        )

    def _answer(self, status: int, body: bytes, content_type: str) -> None:
        self.send_response(status)
        self.send_header("content-type", content_type)
        self.send_header("content-length", str(len(body)))
        self.send_header("content-security-policy", POLICY)
        self.end_headers()
        self.wfile.write(body)


@contextlib.contextmanager
def serve_page(feed: PageFeed, port: int = 0) -> Iterator[str]:
    """Serve the page with made-up documents; yields its address. Port 0 is any free one."""
    server = _Server(feed, port)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.stops.set()
        server.shutdown()
        thread.join()
        server.server_close()
