"""The daemon as a process: starting, stopping, and what it does without a GPU."""

import os
import signal
import socket
from pathlib import Path

from tests.support.node import EXAMPLE, Node, eventually


def test_it_serves_health_metrics_and_the_page_and_no_more(node: Node) -> None:
    node.start_daemon()
    assert node.get("/-/healthy")[0] == 200
    assert node.get("/-/ready")[0] == 200
    assert node.get("/metrics")[0] == 200
    assert "<!doctype html>" in node.get("/")[1].lower()
    assert node.get("/none")[0] == 404
    assert node.get("/metrics/../etc")[0] == 404


def test_a_node_without_a_gpu_costs_one_log_line(node: Node) -> None:
    node.start_daemon("--interval", "0.1")
    cpu = 'torchperfd_collector_last_success_timestamp_seconds{collector="cpu"}'
    eventually(lambda: node.metric(cpu), 10)
    first = node.metric(cpu)
    eventually(lambda: node.metric(cpu) != first, 10)
    eventually(lambda: "nvml" in node.log(), 10, node.log)
    # Nothing to collect is no failure: the series would be 0, as with a broken driver.
    assert node.metric('torchperfd_collector_success{collector="nvml"}') is None
    assert node.metric('torchperfd_collector_success{collector="cpu"}') == 1
    assert node.log().count("nvml") == 1
    assert "Traceback" not in node.log()


def test_sigterm_drains_daemon_with_live_stream_and_slow_scraper(node: Node) -> None:
    node.start_daemon()
    with (
        node.train("--epochs", "500", script=EXAMPLE) as process,
        # A scraper that has connected and never asks.
        socket.create_connection(("127.0.0.1", node.metrics_port), timeout=20) as scraper,
    ):
        eventually(lambda: (node.metric("torchperfd_train_steps_total{") or 0) > 0, 60, node.log)
        assert node.stop_daemon(signal.SIGTERM) == 0
        assert scraper.recv(1) == b"", "the scraper's connection is not closed"
        assert process.poll() is None
        process.kill()
        process.communicate()
    assert not node.socket.exists()
    assert "Traceback" not in node.log()


def test_service_manager_is_notified_when_ready_and_stopping(node: Node) -> None:
    address = node.directory / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(address))
        manager.settimeout(20)
        node.env["NOTIFY_SOCKET"] = str(address)
        node.start_daemon()
        assert manager.recv(100) == b"READY=1"
        node.stop_daemon()
        assert manager.recv(100) == b"STOPPING=1"


def test_socket_by_default_is_only_for_its_owner(node: Node) -> None:
    node.start_daemon()
    assert node.socket.stat().st_mode & 0o777 == 0o600
    node.stop_daemon()
    node.start_daemon("--socket-mode", "666")
    assert node.socket.stat().st_mode & 0o777 == 0o666


def test_it_listens_on_loopback_only(node: Node) -> None:
    daemon = node.start_daemon()
    inodes = {
        os.readlink(path).removeprefix("socket:[").removesuffix("]")
        for path in Path(f"/proc/{daemon.pid}/fd").iterdir()
        if os.readlink(path).startswith("socket:")
    }
    listening = [
        fields[1]
        for table in ("tcp", "tcp6")
        for fields in map(str.split, Path(f"/proc/{daemon.pid}/net/{table}").read_text().splitlines()[1:])
        if fields[3] == "0A" and fields[9] in inodes
    ]
    assert listening == [f"0100007F:{node.metrics_port:04X}"]


def test_errors_of_serve_are_one_line(node: Node) -> None:
    node.start_daemon()
    second = node.command("serve", "--socket", str(node.socket))
    assert (second.returncode, second.stderr.count("\n")) == (1, 1)
    assert "another daemon serves" in second.stderr
    busy = node.command(
        "serve",
        *("--socket", str(node.directory / "other.sock")),
        *("--metrics-address", f"127.0.0.1:{node.metrics_port}"),
    )
    assert (busy.returncode, busy.stderr.count("\n")) == (1, 1)
    assert "--metrics-address" in busy.stderr
    long = node.command("serve", "--socket", "/tmp/" + "x" * 120)
    assert (long.returncode, long.stderr.count("\n")) == (2, 1)
    assert "107" in long.stderr
