"""Handing captures over: what a service takes, and what stays with the user when it does not."""

import contextlib
import json
import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.unit.client.captured_loop import step
from tests.unit.client.test_rank_capture import Prepared

from torchperfd.captures import rank_files
from torchperfd.captures.capture import RankCapture
from torchperfd.captures.files import Handover, HandoverError
from torchperfd.captures.state import CaptureOptions
from torchperfd.hooks.profiler import ARBITER
from torchperfd.v1 import contract, session_pb2

ID = "20260726-101502-3fa1c2"


class Service:
    """A daemon that answers one handover after another, with the given reasons.

    Attributes:
        taken: Capture, and contents by the files' names, of each handover.
        reasons: What it answers, one after the other; then nothing, so that it has taken the files.
    """

    def __init__(self, path: Path) -> None:
        self.taken: list[tuple[str, dict[str, bytes]]] = []
        self.reasons: list[tuple[str, bool]] = []
        self.is_silent = False
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()
        self.handover = Handover(str(path), os.geteuid(), "token")

    def _serve(self) -> None:
        held = []
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                break
            if self.is_silent:
                held.append(connection)
                continue
            with connection:
                if connection.recv(64) != contract.HANDOVER_GREETING:
                    continue
                connection.sendall(contract.HANDOVER_READY)
                head, descriptors, _, _ = socket.recv_fds(connection, 4, 8)
                content = connection.recv(int.from_bytes(head, "big"))
                message = session_pb2.CaptureHandover.FromString(content)
                assert message.token == "token"
                files = {}
                for name, descriptor in zip(message.files, descriptors, strict=True):
                    files[name] = os.pread(descriptor, 1 << 24, 0)
                    os.close(descriptor)
                answer = session_pb2.CaptureHandoverResult()
                if self.reasons:
                    answer.reason, answer.unknown_session = self.reasons.pop(0)
                else:
                    self.taken.append((message.capture_id, files))
                content = answer.SerializeToString()
                connection.sendall(len(content).to_bytes(4, "big") + content)
        for connection in held:
            connection.close()

    def close(self) -> None:
        """Stop."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.setattr(rank_files, "_RETRY_S", 0.0)
    made = Service(tmp_path / "socket")
    yield made
    made.close()
    ARBITER.leave()


def captured(
    directory: Path, handover: Callable[[], Handover | None], *, keeps: bool = False
) -> tuple[RankCapture, Prepared]:
    """Make a capture of two steps with a service; return it, and its outcomes."""
    prepared = Prepared(directory)
    prepared.capture = RankCapture(
        prepared.target,
        capture_id=ID,
        directory=directory / ID,
        options=CaptureOptions(steps=2),
        on_outcome=lambda _, outcome: prepared.outcomes.append(outcome),
        handover=handover,
        keeps=keeps,
    )
    assert prepared.capture.prepare() == ""
    prepared.capture.arm()
    for next_index in (7, 8, 9):
        prepared.capture.train_edge(next_index)
        step()
    assert prepared.capture.ended.wait(60)
    return prepared.capture, prepared


def test_capture_that_is_handed_over_leaves_nothing(tmp_path: Path, service: Service) -> None:
    capture, prepared = captured(tmp_path, lambda: service.handover)
    (outcome,) = prepared.outcomes
    assert (outcome.ok, outcome.reason, outcome.file) == (True, "", "rank0.json")
    [(capture_id, files)] = service.taken
    assert capture_id == ID
    assert len(files["rank0.json"]) == outcome.bytes
    assert json.loads(files["rank0.manifest.json"])["sha256"] == outcome.sha256
    assert not capture.directory.exists()


def test_capture_of_a_script_stays_with_its_user_too(tmp_path: Path, service: Service) -> None:
    capture, prepared = captured(tmp_path, lambda: service.handover, keeps=True)
    assert prepared.outcomes[0].ok
    [(_, files)] = service.taken
    kept = {path.name: path for path in capture.directory.iterdir()}
    assert kept.keys() == files.keys()
    assert kept["rank0.json"].read_bytes() == files["rank0.json"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in kept.values()} == {0o600}


def test_trace_that_the_service_refuses_fails_and_stays(tmp_path: Path, service: Service) -> None:
    service.reasons = [("the disk of the daemon's captures is full", False)]
    capture, prepared = captured(tmp_path, lambda: service.handover)
    (outcome,) = prepared.outcomes
    assert (outcome.ok, outcome.reason) == (
        False,
        "the daemon has not taken the trace: the disk of the daemon's captures is full;"
        f" it is in {capture.directory}",
    )
    assert json.loads((capture.directory / "rank0.json").read_bytes())["traceEvents"]


def test_daemon_that_restarts_takes_it_later(tmp_path: Path, service: Service) -> None:
    service.reasons = [("the daemon has no session of this process", True)] * 2
    sessions = [None, service.handover]

    def newest() -> Handover | None:
        return sessions.pop(0) if len(sessions) > 1 else sessions[0]

    _, prepared = captured(tmp_path, newest)
    assert prepared.outcomes[0].ok
    assert len(service.taken) == 1


def test_daemon_that_is_gone_fails_the_capture_with_its_reason(tmp_path: Path, service: Service) -> None:
    gone = Handover(str(tmp_path / "none"), os.geteuid(), "token")
    capture, prepared = captured(tmp_path, lambda: gone)
    assert "the daemon cannot be reached: No such file or directory" in prepared.outcomes[0].reason
    assert (capture.directory / "rank0.json").exists()


def test_daemon_that_is_stopped_holds_nothing_up(service: Service) -> None:
    service.is_silent = True
    with open("/dev/null", "rb") as file, pytest.raises(HandoverError, match="stopped or overloaded"):
        service.handover.send(ID, {"rank0.json": file.fileno()}, 0.1)


def test_files_go_to_the_daemons_user_only(service: Service) -> None:
    other = Handover(service.handover.socket, os.geteuid() + 1, "token")
    with open("/dev/null", "rb") as file, pytest.raises(HandoverError, match="another user listens"):
        other.send(ID, {"rank0.json": file.fileno()})
    assert service.taken == []
