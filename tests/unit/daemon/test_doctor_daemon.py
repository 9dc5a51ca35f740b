"""``torchperfd doctor --daemon``: each check from facts alone, and the command beside a daemon that runs."""

import asyncio
import json
import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
from tests.support.commands import Run
from tests.support.served import short_directory
from tests.unit.daemon.test_serve import Life

from torchperfd.v1 import contract
from torchperfd_daemon.doctor.running_daemon import DaemonFacts, Place, Samples, examine_daemon, read_page

BUILD = ("1.2.0", "6ba749a4c0de")
WELL = DaemonFacts(
    build=BUILD,
    own_build=BUILD,
    uid=990,
    socket_path=contract.SYSTEM_SOCKET,
    socket=Place(990, 0o666),
    captures_dir="/captures",
    captures=Place(990, 0o700),
    token_path="/run/torchperfd/page.token",
    token=Place(990, 0o600),
    samples=[
        ("torchperfd_collector_success", {"collector": "nvml"}, 1),
        ("torchperfd_ingest_events_total", {}, 10_000),
        ("torchperfd_ingest_dropped_events_total", {"where": "outbox"}, 1),
        ("torchperfd_label_overflow_total", {}, 0),
    ],
)


def with_sample(name: str, value: float, **labels: str) -> DaemonFacts:
    """Return a daemon whose page has this sample instead of its own of that name."""
    others: Samples = [each for each in WELL.samples or () if each[0] != name]
    return replace(WELL, samples=[*others, (name, labels, value)])


@pytest.mark.parametrize(
    "facts",
    [
        WELL,
        replace(WELL, socket_path="/run/user/1000/torchperfd/daemon.sock", socket=Place(990, 0o600)),
        replace(WELL, uid=0, socket=Place(0, 0o666), token=Place(0, 0o600)),
        replace(WELL, captures=None, token=None, samples=None),
    ],
)
def test_daemon_that_is_well_has_no_findings(facts: DaemonFacts) -> None:
    assert examine_daemon(facts) == []


@pytest.mark.parametrize(
    ("facts", "check", "problem", "fix"),
    [
        (replace(WELL, build=("1.1.0", "")), "daemon-version", "1.1.0 (commit unknown) runs", "same version"),
        (replace(WELL, build=("1.2.0", "f" * 40)), "daemon-version", "1.2.0 (ffffffffffff)", "restart"),
        (replace(WELL, socket=Place(1001, 0o666)), "daemon-socket", "belongs to user 1001", "remove"),
        (replace(WELL, socket=Place(990, 0o660)), "daemon-socket", "mode is 660", "--socket-mode 666"),
        (replace(WELL, captures=Place(1001, 0o700)), "daemon-captures", "owner 1001", "chown 990"),
        (replace(WELL, captures=Place(990, 0o500)), "daemon-captures", "mode 500", "chmod 700"),
        (replace(WELL, captures=Place(990, 0o700, True)), "daemon-captures", "read-only", "--captures-dir"),
        (replace(WELL, token=Place(990, 0o640)), "daemon-token", "mode 640", "restart"),
        (replace(WELL, token=Place(1001, 0o600)), "daemon-token", "owner 1001", "restart"),
        (
            with_sample("torchperfd_collector_success", 0, collector="ownership"),
            "daemon-collectors",
            "its newest sample failed",
            "journalctl",
        ),
        (
            with_sample("torchperfd_ingest_dropped_events_total", 100, where="ring"),
            "daemon-losses",
            "100 of 10,100 steps were lost since it started (ring)",
            "CPUWeight",
        ),
        (with_sample("torchperfd_label_overflow_total", 3), "daemon-losses", "3 series", "per job"),
    ],
)
def test_each_check_finds_its_fault_alone(facts: DaemonFacts, check: str, problem: str, fix: str) -> None:
    [finding] = examine_daemon(facts)
    assert finding.check == check
    assert problem in finding.problem
    assert fix in finding.fix


def test_page_with_a_password_is_no_page() -> None:
    class Refusing(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(401)

        def log_message(self, *_: object) -> None:
            """Write nothing."""

    with HTTPServer(("127.0.0.1", 0), Refusing) as server:
        Thread(target=server.handle_request).start()
        with pytest.raises(ValueError, match="answers 401"):
            read_page(f"http://127.0.0.1:{server.server_port}/metrics")


@pytest.fixture
def life(monkeypatch: pytest.MonkeyPatch) -> Iterator[Life]:
    with short_directory() as directory, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.setblocking(False)
        manager.bind(str(directory / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(directory / "notify"))
        yield Life(directory, manager)


async def test_running_daemon_is_examined_with_its_page(life: Life, run: Run) -> None:
    place = life.directory / "run"
    (life.directory / "captures").mkdir(mode=0o700)
    async with life.running():

        async def doctor(*options: str) -> tuple[int, str, str]:
            command = ("doctor", "--daemon", "--socket", str(place / "d.sock"), *options)
            return await asyncio.to_thread(run, *command)

        well = await doctor()
        (place / "d.sock.page.token").chmod(0o644)
        loose = json.loads((await doctor("--json"))[1])
        (place / "d.sock.page.token").chmod(0o600)
        os.kill(os.getpid(), signal.SIGTERM)
    assert well == (0, "nothing found\n", "")
    assert [each["check"] for each in loose["findings"]] == ["daemon-token"]
    assert loose["skipped"] == []


def test_doctor_without_a_daemon_ends_with_its_exit_code(run: Run, tmp_path: Path) -> None:
    code, out, err = run("doctor", "--daemon", "--socket", tmp_path / "no.sock")
    assert (code, out) == (4, "")
    assert "no daemon answers at" in err


def test_doctor_on_a_node_of_a_service_names_its_socket(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHPERFD_SOCKET", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(contract, "SYSTEM_SOCKET", str(tmp_path / "service" / "daemon.sock"))
    assert run("doctor", "--daemon")[2].startswith(f"torchperfd: no daemon answers at {tmp_path}/torchperfd/")
    (tmp_path / "service").mkdir()
    assert run("doctor", "--daemon")[2].startswith(f"torchperfd: no daemon answers at {tmp_path}/service/")
