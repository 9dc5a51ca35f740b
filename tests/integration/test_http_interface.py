"""The HTTP interface of a real daemon with a real job: watched, captured, reported, and across a restart."""

import http.client
import json
import queue
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest
from tests.support.node import Node, eventually

GIVE_UP_S: Final = 60


class Client:
    """A client of the daemon's HTTP side."""

    def __init__(self, node: Node) -> None:
        self.node = node

    @property
    def token(self) -> dict[str, str]:
        """The header with the token of the daemon that runs now."""
        return {"x-torchperfd-token": (self.node.directory / "d.sock.page.token").read_text().strip()}

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.node.metrics_port, timeout=GIVE_UP_S)
        try:
            sent = {name.replace("_", "-"): value for name, value in headers.items()}
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {**sent, "content-type": "application/json"})
            answer = connection.getresponse()
            content = answer.read()
            is_json = answer.headers["content-type"].startswith("application/json")
            return answer.status, json.loads(content) if is_json else content
        finally:
            connection.close()

    def get(self, path: str) -> Any:
        code, document = self.ask("GET", f"/api/v1/{path}")
        assert code == 200, document
        return document

    def act(self, path: str, body: Any = None) -> tuple[int, Any]:
        return self.ask("POST", f"/api/v1/{path}", body, **self.token)

    @contextmanager
    def events(self, path: str) -> Iterator["queue.Queue[tuple[str, Any]]"]:
        """Read a stream of events on a thread; ("end", None) is its end."""
        found: queue.Queue[tuple[str, Any]] = queue.Queue()
        connection = http.client.HTTPConnection("127.0.0.1", self.node.metrics_port, timeout=GIVE_UP_S)
        connection.request("GET", path)
        answer = connection.getresponse()
        assert answer.status == 200

        def read() -> None:
            name = ""
            try:
                for line in answer:
                    kind, _, value = line.decode().rstrip("\n").partition(": ")
                    if kind == "event":
                        name = value
                    elif kind == "data":
                        found.put((name, json.loads(value)))
            except (OSError, http.client.HTTPException):
                pass
            found.put(("end", None))

        thread = threading.Thread(target=read)
        thread.start()
        try:
            yield found
        finally:
            if connection.sock is not None:
                connection.sock.shutdown(socket.SHUT_RDWR)
            thread.join(GIVE_UP_S)
            connection.close()


def wait_for(found: "queue.Queue[tuple[str, Any]]", name: str) -> Any:
    """Return the data of the next event of a name."""
    deadline = time.monotonic() + GIVE_UP_S
    while time.monotonic() < deadline:
        kind, data = found.get(timeout=GIVE_UP_S)
        if kind == name:
            return data
        assert kind != "end", "the stream has ended"
    raise AssertionError(f"no event {name}")


def capture_file(client: Client, capture_id: str) -> str:
    _, capture = client.ask("GET", f"/api/v1/captures/{capture_id}", **client.token)
    name: str = capture["ranks"][0]["file"]
    return name


@pytest.mark.slow
def test_a_run_is_watched_captured_and_reported(node: Node) -> None:
    node.start_daemon()
    client = Client(node)
    job = node.train("--pause", "0.01", TORCHPERFD_RUN="web")
    with job, client.events("/api/v1/events?run=web") as found:
        steps = wait_for(found, "steps")["ranks"][0]
        assert steps["step_seconds"]
        wait_for(found, "seconds")
        history = client.get("runs/web/history")
        assert history["ranks"][0]["steps"]["step_seconds"]
        assert client.get("runs")["runs"][0]["state"] in ("training", "starting")
        assert client.ask("POST", "/api/v1/runs/web/capture")[0] == 401
        code, begun = client.act("runs/web/capture", {"steps": 3})
        assert code == 202, begun
        while (capture := wait_for(found, "capture")["capture"])["state"] not in ("complete", "failed"):
            pass
        assert (capture["state"], capture["capture_id"]) == ("complete", begun["capture_id"])
        code, stacks = client.act("runs/web/stacks")
        assert (code, stacks["schema"]) == (200, "torchperfd.stacks/1")
    capture_id = begun["capture_id"]

    def report() -> Any:
        _, state = client.act(f"captures/{capture_id}/report")
        assert state["state"] != "failed", state
        return state

    eventually(lambda: report()["state"] == "ready", GIVE_UP_S, node.log)
    code, page = client.ask("GET", report()["url"])
    assert code == 200
    assert page.startswith(b"<!doctype html>")
    name = capture_file(client, capture_id)
    path = f"/api/v1/captures/{capture_id}/files/{name}"
    assert client.ask("GET", path)[0] == 401
    code, trace = client.ask("GET", path, **client.token)
    assert (code, trace) == (200, json.loads((node.captures / capture_id / name).read_bytes()))
    eventually(lambda: client.get("runs")["finished"], GIVE_UP_S, node.log)
    assert "by uid" in node.log()


def test_streams_end_with_the_daemon_and_tokens_change(node: Node) -> None:
    node.start_daemon()
    client = Client(node)
    first = client.token
    instance = client.get("info")["instance"]
    with client.events("/api/v1/events") as found:
        wait_for(found, "hello")
        assert node.stop_daemon() == 0
        assert wait_for(found, "bye")
        assert found.get(timeout=GIVE_UP_S)[0] == "end"
    assert not (node.directory / "d.sock.page.token").exists()
    node.start_daemon()
    assert client.get("info")["instance"] != instance
    assert client.ask("GET", "/api/v1/runs", **first)[0] == 401
    assert client.ask("GET", "/api/v1/runs", **client.token)[0] == 200
    assert (node.directory / "d.sock.page.token").stat().st_mode & 0o777 == 0o600
    assert "Traceback" not in node.log()


@pytest.mark.slow
def test_a_stream_outlives_the_deadline_of_requests(node: Node) -> None:
    node.start_daemon()
    with Client(node).events("/api/v1/events") as found:
        wait_for(found, "hello")
        began = time.monotonic()
        # Longer than a request may take; the heartbeats keep the connection.
        while time.monotonic() - began < 11:
            with pytest.raises(queue.Empty):
                found.get(timeout=1)
