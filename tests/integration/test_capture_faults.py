"""What goes wrong in the middle of a capture: the manifest stays true, and training is not harmed."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from tests.support.node import Node, eventually

from torchperfd_daemon.captures.catalog import Catalog
from torchperfd_daemon.captures.manifest import CaptureState

pytestmark = pytest.mark.slow

# Each step adds exactly 1 to the weight, so the script itself knows whether anything was lost.
SCRIPT: Final = """
import os, pathlib, resource, sys, time, torch
rank, stop = int(os.environ["RANK"]), pathlib.Path(sys.argv[1])
torch.set_num_threads(1)
weight = torch.nn.Parameter(torch.zeros(1))
optimizer = torch.optim.SGD([weight], lr=1.0)
def train(steps=10**9):
    made = 0
    while made < steps and not stop.exists():
        optimizer.zero_grad()
        loss = -weight.sum()
        for _ in range(WORK):
            loss = loss + 0.0
        loss.backward()
        optimizer.step()
        made += 1
        time.sleep(0.005)
    return made
def main():
    return train()
made = (main_of_rank_1 if rank == 1 else main)()
assert weight.item() == made, (weight.item(), made)
print("whole", made)
"""


class Pair:
    """Two ranks of one run that do not wait for each other, so that one can be hurt alone."""

    def __init__(self, node: Node, directory: Path, rank_1: str = "main_of_rank_1 = main", work: int = 1):
        self.node = node
        self.stop = directory / "stop"
        script = directory / "pair.py"
        script.write_text(SCRIPT.replace("made = (", f"{rank_1}\nmade = (").replace("WORK", str(work)))
        self.ranks = [self._start(script, rank) for rank in (0, 1)]
        self.killed: set[int] = set()

    def _start(self, script: Path, rank: int) -> "subprocess.Popen[str]":
        env = {"RANK": str(rank), "WORLD_SIZE": "2", "TORCHPERFD_RUN": "pair", "TORCHPERFD_JOB": "faults"}
        return subprocess.Popen(
            [sys.executable, "-m", "torchperfd", "run", "--quiet", str(script), str(self.stop)],
            env={**self.node.env, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def steps(self) -> list[int]:
        """Return how far the ranks are, as far as the daemon knows."""
        found = self.node.command("ps", "--json")
        if found.returncode:
            return []
        return [rank["steps"] for run in json.loads(found.stdout)["runs"] for rank in run["ranks"]]

    def kill(self, rank: int) -> None:
        """End a rank as the kernel's OOM killer would."""
        self.killed.add(rank)
        self.ranks[rank].kill()
        self.ranks[rank].wait(30)

    def end(self) -> None:
        """Let the ranks end; those that live must have trained without a loss."""
        self.stop.touch()
        for rank, process in enumerate(self.ranks):
            if rank not in self.killed:
                output, _ = process.communicate(timeout=60)
                assert process.returncode == 0, rank
                assert output.startswith("whole "), output

    def close(self) -> None:
        """Leave nothing behind."""
        for process in self.ranks:
            process.kill()
            process.communicate()


@pytest.fixture
def pairs(node: Node, tmp_path: Path) -> Iterator[Callable[..., Pair]]:
    """Start a daemon and a pair that trains; end both."""
    started: list[Pair] = []

    def start(*options: str, **more: Any) -> Pair:
        node.start_daemon(*options)
        pair = Pair(node, tmp_path, **more)
        started.append(pair)
        eventually(lambda: len(steps := pair.steps()) == 2 and all(steps), 150, node.log)
        return pair

    yield start
    for pair in started:
        pair.close()


@contextlib.contextmanager
def capturing(node: Node, *options: str) -> Iterator["subprocess.Popen[str]"]:
    """Capture in the background."""
    with node.running(sys.executable, "-m", "torchperfd", "capture", *options) as process:
        yield process


def folder(node: Node) -> Path:
    """Return the one capture's folder, once it is there."""
    eventually(lambda: list(node.captures.glob("2*/manifest.json")), 30, node.log)
    [found] = node.captures.glob("2*")
    return found


def until_armed(node: Node) -> Path:
    """Return the one capture's folder once its steps are agreed on."""
    found = folder(node)
    eventually(lambda: manifest(found)["state"] == "armed", 30, node.log)
    return found


def manifest(found: Path) -> Any:
    """Return what the daemon has written of a capture."""
    return json.loads((found / "manifest.json").read_text())


def outcomes(document: Any) -> list[tuple[str, str]]:
    """Return each rank's state and reason."""
    return [(rank["state"], rank["reason"]) for rank in document["ranks"]]


def files(found: Path) -> list[str]:
    """Return what the ranks have left in a capture's folder, hidden or not."""
    return sorted(path.name for path in found.iterdir() if "rank" in path.name)


LEFT: Final = ("failed", "the process left during the capture")


def test_a_rank_killed_while_it_prepares_is_named(node: Node, pairs: Callable[..., Pair]) -> None:
    pair = pairs()
    # Stopped, it cannot acknowledge.
    pair.ranks[1].send_signal(signal.SIGSTOP)
    with capturing(node, "--steps", "3") as command:
        found = folder(node)
        assert manifest(found)["state"] == "preparing"
        pair.kill(1)
        _, errors = command.communicate(timeout=60)
    assert command.returncode == 5, errors
    assert "rank 1: the process left during the capture" in errors
    assert outcomes(manifest(found)) == [("complete", ""), LEFT]
    pair.end()


def test_a_rank_killed_while_it_is_armed_is_named(node: Node, pairs: Callable[..., Pair]) -> None:
    pair = pairs()
    with capturing(node, "--steps", "200") as command:
        found = until_armed(node)
        pair.kill(1)
        _, errors = command.communicate(timeout=60)
    assert command.returncode == 5, errors
    document = manifest(found)
    assert (document["state"], outcomes(document)) == ("partial", [("complete", ""), LEFT])
    assert [rank["steps_made"] for rank in document["ranks"]] == [200, 0]
    pair.end()


def test_a_rank_killed_while_it_writes_its_trace_is_named(node: Node, pairs: Callable[..., Pair]) -> None:
    pair = pairs(work=300)
    with capturing(node, "--steps", "60") as command:
        found = until_armed(node)
        # As Kineto calls it until all is written.
        deadline = time.monotonic() + 60
        while not list(found.glob(".rank1.*.json.tmp")):
            assert time.monotonic() < deadline
        pair.ranks[1].send_signal(signal.SIGSTOP)
        assert not (found / "rank1.json").exists(), "too late to kill it in the middle"
        pair.kill(1)
        _, errors = command.communicate(timeout=60)
    assert command.returncode == 5, errors
    assert outcomes(manifest(found)) == [("complete", ""), LEFT]
    assert not (found / "rank1.json").exists()
    pair.end()


@pytest.mark.parametrize("survivors", [2, 1])
def test_daemon_killed_during_capture_keeps_traces_and_manifest(
    node: Node, pairs: Callable[..., Pair], survivors: int
) -> None:
    pair = pairs()
    with capturing(node, "--steps", "400") as command:
        found = until_armed(node)
        # The manifest is written before the ranks get their command, which they have by the next answer.
        assert len(pair.steps()) == 2
        node.stop_daemon(signal.SIGKILL)
        _, errors = command.communicate(timeout=60)
    assert command.returncode == 4
    assert errors.splitlines()[-1].startswith("torchperfd: the daemon ended during the capture;")
    if survivors == 1:
        pair.kill(1)
    node.start_daemon()
    # The last that a rank writes.
    eventually(lambda: (found / "rank0.manifest.json").exists(), 60, node.log)
    if survivors == 2:
        eventually(lambda: manifest(found)["state"] == "complete", 60, node.log)
        [listed] = node.json("captures", "list")["captures"]
        assert (listed["state"], outcomes(listed)) == ("complete", [("complete", "")] * 2)
    else:
        # As it will be listed once the capture's time is up.
        later = Catalog(node.captures, wall=lambda: time.time() + 300).get(found.name)
        assert later.state is CaptureState.PARTIAL
        assert later.reason == "rank 1: no report from this rank; the daemon ended during the capture"
        assert later.ranks[0].state is CaptureState.COMPLETE
    # The next one captures all that are left; a rank that is missing makes it partial.
    eventually(lambda: len(pair.steps()) == survivors, 30, node.log)
    done = node.command("capture", "--steps", "2", "--json")
    assert done.returncode == (0 if survivors == 2 else 5), done.stderr
    states = [state for state, _ in outcomes(json.loads(done.stdout))]
    assert states == ["complete", "complete" if survivors == 2 else "failed"]
    pair.end()


def test_job_that_ends_during_capture_fails_ranks_with_reason(node: Node, pairs: Callable[..., Pair]) -> None:
    pair = pairs()
    with capturing(node, "--steps", "1000") as command:
        found = until_armed(node)
        pair.end()
        _, errors = command.communicate(timeout=60)
    assert command.returncode == 1, errors
    document = manifest(found)
    assert document["state"] == "failed"
    assert all("training ended" in rank["reason"] for rank in document["ranks"]), document["ranks"]
    assert not list(found.glob("*rank*.json.*"))


def test_a_disk_that_is_full_fails_the_rank_that_met_it(node: Node, pairs: Callable[..., Pair]) -> None:
    limited = (
        "def main_of_rank_1():\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))\n"
        "    return train()"
    )
    pair = pairs(rank_1=limited)
    with capturing(node, "--steps", "20") as command:
        found = folder(node)
        _, errors = command.communicate(timeout=60)
    assert command.returncode == 5, errors
    state, reason = outcomes(manifest(found))[1]
    assert state == "failed"
    assert reason.startswith("cannot write the trace: torch wrote no trace to "), reason
    assert files(found) == ["rank0.json", "rank0.manifest.json", "rank1.manifest.json"]
    pair.end()


def test_a_trace_beyond_its_share_is_not_kept_by_its_own_rank(node: Node, pairs: Callable[..., Pair]) -> None:
    pair = pairs("--captures-max-bytes-each", "100KB")
    done = node.command("capture", "--steps", "50")
    assert done.returncode == 1, done.stderr
    found = folder(node)
    for state, reason in outcomes(manifest(found)):
        assert state == "failed"
        assert reason.endswith(
            " bytes, 50,000 are allowed; capture fewer steps or raise --captures-max-bytes-each"
        )
    assert files(found) == ["rank0.manifest.json", "rank1.manifest.json"]
    own = json.loads((found / "rank0.manifest.json").read_text())
    assert (own["state"], own["steps_made"], own["file"]) == ("failed", 50, "")
    pair.end()


def test_rank_with_own_profiler_is_named_and_keeps_its_profile(
    node: Node, pairs: Callable[..., Pair]
) -> None:
    profiled = (
        "def main_of_rank_1():\n"
        "    from torch.profiler import profile\n"
        "    with profile() as own:\n"
        "        made = train()\n"
        "    assert sum(each.count for each in own.key_averages() if each.key == 'aten::neg') >= made\n"
        "    return made"
    )
    pair = pairs(rank_1=profiled)
    done = node.command("capture", "--steps", "3")
    assert done.returncode == 5, done.stderr
    assert "rank 1: the script's own profiler is active" in done.stderr
    [rank_0, rank_1] = outcomes(manifest(folder(node)))
    assert (rank_0, rank_1[0]) == (("complete", ""), "failed")
    pair.end()


def test_capture_cancelled_by_command_lets_the_next_begin(node: Node, pairs: Callable[..., Pair]) -> None:
    pair = pairs()
    with contextlib.ExitStack() as stack:
        command = stack.enter_context(capturing(node, "--steps", "1000"))
        first = until_armed(node)
        next_one = stack.enter_context(capturing(node, "--steps", "2", "--queue"))
        assert next_one.stderr is not None
        queued = next_one.stderr.readline()
        assert queued.endswith(" queued behind another of run pair\n"), queued
        cancelled = node.command("captures", "cancel", first.name)
        assert cancelled.returncode == 0, cancelled.stderr
        _, errors = command.communicate(timeout=60)
        output, more_errors = next_one.communicate(timeout=60)
    assert command.returncode == 1, errors
    assert f"capture {first.name} failed: cancelled by command" in errors
    document = manifest(first)
    assert (document["cancelled_by"], document["reason"]) == ("command", "cancelled by command")
    assert {rank["reason"] for rank in document["ranks"]} == {"cancelled by command"}
    assert next_one.returncode == 0, more_errors
    assert len(output.splitlines()) == 2
    again = node.command("captures", "cancel", first.name)
    assert (again.returncode, os.linesep.join(again.stderr.splitlines())) == (
        3,
        f"torchperfd: no capture '{first.name}' is queued or in progress;"
        " list them with `torchperfd captures list`",
    )
    pair.end()
