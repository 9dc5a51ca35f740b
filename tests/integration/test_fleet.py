"""Two network namespaces as two nodes: one command asks, and captures, the whole job."""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.node import Node, eventually

pytestmark = [pytest.mark.slow, pytest.mark.needs("ip", "unshare")]

SCRIPT = """
import time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    optimizer.zero_grad()
    model(torch.randn(16, 32)).sum().backward()
    optimizer.step()
    # The whole second node is slow, so that none of its ranks is by its own daemon's lights.
    time.sleep(0.005 if dist.get_rank() < 2 else 0.03)
"""
PORT = 9408
TOKEN = secrets.token_hex(32)


class Host(Node):
    """A node with a network and a name of its own."""

    def __init__(self, name: str, address: str, interface: str) -> None:
        super().__init__()
        self.name, self.address, self.interface = name, address, interface
        self.peer = f"{address}:{PORT}"
        self.token = self.directory / "token"
        self.token.write_text(TOKEN)
        self.token.chmod(0o600)
        # Its ranks must find no rendezvous, proxy or interface of the machine's own.
        self.env |= {"GLOO_SOCKET_IFNAME": interface, "TORCHPERFD_RUN": "both", "TORCHPERFD_JOB": "pair"}

    def inside(self, *command: str) -> list[str]:
        """Return a command as it is run on this host."""
        named = ("unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.name)
        return ["ip", "netns", "exec", self.interface, *named, *command]

    def serve(self, peers: str) -> None:
        """Start the host's daemon."""
        with (self.directory / "daemon.log").open("ab") as log:
            self.daemon = subprocess.Popen(
                self.inside(
                    *(sys.executable, "-m", "torchperfd", "serve", "--metrics-address", "127.0.0.1:0"),
                    *("--fleet-address", self.peer, "--fleet-peers", peers),
                    *("--fleet-token-file", str(self.token)),
                ),
                env=self.env,
                stdout=log,
                stderr=log,
            )

    def torchrun(self, node_rank: int, master: str, script: Path) -> "subprocess.Popen[bytes]":
        """Start this host's two ranks of the job."""
        with (self.directory / "job.log").open("wb") as log:
            return subprocess.Popen(
                self.inside(
                    *(sys.executable, "-m", "torch.distributed.run"),
                    *("--nnodes", "2", "--nproc-per-node", "2"),
                    *("--node-rank", str(node_rank), "--master-addr", master, "--master-port", "29400"),
                    *("-m", "torchperfd", "run", "--quiet", str(script)),
                ),
                env=self.env,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def clear(self) -> None:
        """Kill all that runs on this host: torchrun's workers have sessions of their own and outlive it."""
        found = subprocess.run(
            ["ip", "netns", "pids", self.interface], capture_output=True, text=True, check=True
        )
        for pid in map(int, found.stdout.split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def ask(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Run ``torchperfd …`` on this host."""
        return subprocess.run(
            self.inside(sys.executable, "-m", "torchperfd", *arguments),
            env=self.env,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    yield from joined_hosts()


def joined_hosts() -> Iterator[list[Host]]:
    """Yield two hosts, joined by one cable."""
    mark = secrets.token_hex(3)
    hosts = [Host(f"node-{end}", f"10.213.7.{end}", f"tp{mark}{end}") for end in (1, 2)]
    made: list[str] = []
    try:
        for host in hosts:
            probe = subprocess.run(
                ["ip", "netns", "add", host.interface], capture_output=True, text=True, check=False
            )
            if probe.returncode:
                pytest.skip(f"no network namespaces here: {probe.stderr.strip()}")
            made.append(host.interface)
        one, two = (host.interface for host in hosts)
        _ip("link", "add", one, "netns", one, "type", "veth", "peer", "name", two, "netns", two)
        for host in hosts:
            _ip("-n", host.interface, "address", "add", f"{host.address}/24", "dev", host.interface)
            for link in ("lo", host.interface):
                _ip("-n", host.interface, "link", "set", link, "up")
        yield hosts
    finally:
        for host in hosts:
            if host.interface in made:
                host.clear()
                _ip("netns", "delete", host.interface)
            host.close()


@pytest.fixture
def job(hosts: list[Host], tmp_path: Path) -> Iterator[list[Host]]:
    """Four ranks that train on the two hosts, with a daemon on each."""
    script = tmp_path / "pair.py"
    script.write_text(SCRIPT)
    for host in hosts:
        host.serve(",".join(each.peer for each in hosts))
    for host in hosts:
        eventually(lambda host=host: host.ask("ps").returncode == 0, 30, host.log)  # type: ignore[misc]
    started = [host.torchrun(number, hosts[0].address, script) for number, host in enumerate(hosts)]
    try:
        eventually(
            lambda: [rank["steps"] > 20 for rank in _ranks(hosts[0])] == [True] * 4,
            90,
            lambda: "\n".join((host.directory / "job.log").read_text() for host in hosts),
        )
        yield hosts
    finally:
        for host in hosts:
            host.clear()
        for process in started:
            process.wait()


def test_one_command_captures_both_nodes_at_the_same_steps(job: list[Host]) -> None:
    one, two = job
    listed = json.loads(one.ask("ps", "--fleet", "--json").stdout)
    assert [(node["node"], node["connected_ranks"]) for node in listed["nodes"]] == [
        ("node-1", 2),
        ("node-2", 2),
    ]
    assert [(rank["rank"], rank["node"]) for rank in listed["runs"][0]["ranks"]] == [
        (0, "node-1"),
        (1, "node-1"),
        (2, "node-2"),
        (3, "node-2"),
    ]
    captured = two.ask("capture", "--fleet", "--steps", "4", "--json")
    assert captured.returncode == 0, captured.stderr
    document = json.loads(captured.stdout)
    steps = list(range(*document["step_range"]))
    assert len(steps) == 4
    assert [(rank["rank"], rank.get("node")) for rank in document["ranks"]] == [
        (0, "node-1"),
        (1, "node-1"),
        (2, None),
        (3, None),
    ]
    for host, ranks in ((one, (0, 1)), (two, (2, 3))):
        folder = host.captures / document["capture_id"]
        assert [_steps(folder / f"rank{rank}.json") for rank in ranks] == [steps, steps]
    whole, part = (_manifest(host, document["capture_id"]) for host in (two, one))
    assert [rank["node"] for rank in whole["ranks"]] == ["node-1", "node-1", "node-2", "node-2"]
    # Both have the one machine's clock, so what is found is how wrong it can be.
    assert all(0 < abs(rank["clock_offset_ns"]) < 200e6 for rank in whole["ranks"][:2])
    assert (part["trigger"], part["state"], part["step_range"]) == ("fleet", "complete", whole["step_range"])
    assert [(rank["rank"], rank["sha256"]) for rank in part["ranks"]] == [
        (rank["rank"], rank["sha256"]) for rank in whole["ranks"][:2]
    ]


def test_any_daemon_compares_the_ranks_of_both_nodes(job: list[Host]) -> None:
    one, two = job

    def verdict(host: Host, *scope: str) -> list[Any]:
        done = host.ask("diagnose", *scope, "--json")
        assert done.returncode == 0, done.stderr
        [reported] = json.loads(done.stdout)["verdicts"]
        return [reported[name] for name in ("run", "cause", "node")]

    # On a busy machine other causes come and go.
    for host, scope in ((one, ("--fleet",)), (two, ("--job", "pair"))):
        eventually(
            lambda host=host, scope=scope: verdict(host, *scope) == ["both", "slow rank", "node-2"],  # type: ignore[misc]
            30,
            lambda host=host, scope=scope: str(verdict(host, *scope)),  # type: ignore[misc]
        )

    ranks = two.ask("ranks", "--fleet", "--json")
    assert ranks.returncode == 0, ranks.stderr
    [run] = json.loads(ranks.stdout)["runs"]
    assert [(rank["rank"], rank["node"]) for rank in run["ranks"]] == [
        (0, "node-1"),
        (1, "node-1"),
        (2, "node-2"),
        (3, "node-2"),
    ]
    assert [rank["behind_seconds"] > 0.01 for rank in run["ranks"]] == [False, False, True, True]
    assert "4 of 4 ranks on 2 nodes" in one.ask("ranks", "--job", "pair").stdout
    frame = one.ask("top", "--fleet")
    assert frame.returncode == 0, frame.stderr
    assert all(name in frame.stdout for name in ("node-1", "node-2", "4 of 4 ranks"))
    captured = two.ask("capture", "--job", "pair", "--steps", "2", "--json")
    assert captured.returncode == 0, captured.stderr
    assert [rank["state"] for rank in json.loads(captured.stdout)["ranks"]] == ["complete"] * 4

    two.stop_daemon(signal.SIGKILL)
    for name in ("ranks", "diagnose", "top", "ps"):
        for scope in (("--fleet",), ("--job", "pair")):
            done = one.ask(name, *scope)
            assert done.returncode == 5, done.stderr
            assert two.peer in done.stderr
            assert "both" in done.stdout


def test_a_daemon_that_is_gone_is_named_and_so_are_its_ranks(job: list[Host]) -> None:
    one, two = job
    reported = one.ask("stacks", "--fleet", "--json")
    assert reported.returncode == 0, reported.stderr
    assert [rank["node"] for rank in json.loads(reported.stdout)["ranks"]] == ["node-1"] * 2 + ["node-2"] * 2
    two.stop_daemon(signal.SIGKILL)
    listed = one.ask("ps", "--fleet", "--json")
    assert listed.returncode == 5
    assert two.peer in listed.stderr
    assert [peer["address"] for peer in json.loads(listed.stdout)["unreachable"]] == [two.peer]
    stacks = one.ask("stacks", "--fleet")
    assert stacks.returncode == 5
    assert "ranks 2-3 are on no node that answers" in stacks.stderr
    captured = one.ask("capture", "--fleet", "--steps", "2", "--json")
    assert captured.returncode == 5, captured.stderr
    document = json.loads(captured.stdout)
    assert [rank["state"] for rank in document["ranks"]] == ["complete", "complete", "failed", "failed"]
    assert all(two.peer in rank["reason"] for rank in document["ranks"][2:])
    assert _manifest(one, document["capture_id"])["state"] == "partial"


def _ranks(host: Host) -> list[dict[str, Any]]:
    done = host.ask("ps", "--fleet", "--json")
    assert done.returncode == 0, done.stderr
    return [rank for run in json.loads(done.stdout)["runs"] for rank in run["ranks"]]


def _steps(trace: Path) -> list[int]:
    names = {event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"]}
    return sorted(int(name.partition("#")[2]) for name in names if name.startswith("ProfilerStep#"))


def _manifest(host: Host, capture_id: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((host.captures / capture_id / "manifest.json").read_text())
    return found


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
