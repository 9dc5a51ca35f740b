"""Where ranks stand that hang: in Python, in C with the interpreter held, stopped, for want of a peer."""

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.support.node import Node, eventually, new_node
from tests.unit.daemon.processes import process

from torchperfd_daemon.service.stuck_rank_stacks import request_stacks_by_signal
from torchperfd_daemon.stacks.model import Thread

pytestmark = pytest.mark.slow

HANG = """
import ctypes, sys, threading, time, torch, torchperfd
def in_sleep():
    time.sleep(600)
def in_c_with_the_interpreter_held():
    ctypes.PyDLL(None).usleep(600_000_000)  # PyDLL keeps what CDLL gives up
def in_c_with_the_interpreter_held_and_busy():
    pattern.fullmatch("a" * 64 + "b")
import re
pattern = re.compile("(a|a)*")
client = torchperfd.attach(run="hang")
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
threading.Thread(target=in_sleep, name="a helper of the script's", daemon=True).start()
while not client.connected:
    time.sleep(0.05)
client.report()
print("hangs", flush=True)
globals()[sys.argv[1]]()
"""

SKIP = """
import sys, torch, torch.distributed as dist
from datetime import timedelta
def exchange(metric):
    dist.all_reduce(metric)
def compute(step):
    while step == 3:
        torch.ones(8).sum()
dist.init_process_group("gloo", timeout=timedelta(seconds=600))
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    if dist.get_rank() == 2:
        compute(step)
    exchange(torch.ones(1))
"""


def line_of(script: str, text: str) -> int:
    (number,) = (number for number, line in enumerate(script.splitlines(), start=1) if text in line)
    return number


def stacks(node: Node, *arguments: str) -> tuple[int, Any]:
    done = node.command("stacks", "--json", *arguments, timeout=60)
    return done.returncode, json.loads(done.stdout)


def by_signal(pid: int) -> tuple[Thread, ...]:
    """Have the client's own handler write the stacks, whether py-spy is installed or not."""
    return asyncio.run(request_stacks_by_signal(process(pid), 8))


class Hung:
    """A training process that hangs in a function of its script."""

    def __init__(self, node: Node, process: Any) -> None:
        self.node = node
        self.process = process

    def rank(self, *arguments: str) -> Any:
        _, document = stacks(self.node, "--timeout", "8", *arguments)
        (rank,) = document["ranks"]
        return rank


@pytest.fixture(scope="module")
def hung(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Hung]:
    """One process for all tests that ask for the same function; the test that kills it comes last."""
    script = tmp_path_factory.mktemp("hung") / "hang.py"
    script.write_text(HANG)
    with new_node() as node:
        node.start_daemon()
        with node.running(sys.executable, str(script), request.param) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "hangs\n"
            yield Hung(node, process)
            process.kill()
            process.communicate()


def training_frames(rank: Any) -> list[str]:
    (thread,) = (thread for thread in rank["threads"] if thread["training"])
    return [f"{Path(frame['file']).name}:{frame['line']} {frame['function']}" for frame in thread["frames"]]


@pytest.mark.parametrize("hung", ["in_sleep"], indirect=True)
def test_a_rank_that_hangs_in_python_answers_itself(hung: Hung) -> None:
    rank = hung.rank()
    assert (rank["outcome"], rank["reason"], rank["step"]) == ("answered", "", 3)
    assert training_frames(rank) == [
        f"hang.py:{line_of(HANG, 'time.sleep(600)')} in_sleep",
        f"hang.py:{line_of(HANG, 'globals()')} <module>",
    ]
    names = {thread["name"]: thread["own"] for thread in rank["threads"]}
    assert not names["MainThread"]
    assert not names["a helper of the script's"]
    assert {"torchperfd-stream", "torchperfd-flusher"} <= {name for name, own in names.items() if own}
    assert [name for name, own in names.items() if not own and "Thread-" in name] == []


held_in_c = pytest.mark.parametrize(
    "hung", ["in_c_with_the_interpreter_held", "in_c_with_the_interpreter_held_and_busy"], indirect=True
)


@pytest.mark.needs("py-spy")
@held_in_c
def test_stacks_of_a_held_interpreter_are_read_by_py_spy(hung: Hung, request: pytest.FixtureRequest) -> None:
    name = request.node.callspec.params["hung"]
    for _ in range(3):
        rank = hung.rank("--signal")
        assert rank["outcome"] == "read", rank["reason"]
        assert rank["reason"] == "no Python thread of it answers, as when native code holds the interpreter"
        frames = training_frames(rank)
        assert frames[-1] == f"hang.py:{line_of(HANG, 'globals()')} <module>"
        assert any(frame.endswith(f" {name}") for frame in frames)
        assert [thread["own"] for thread in rank["threads"]].count(False) == 2
    assert hung.process.poll() is None


@held_in_c
def test_signal_to_a_held_interpreter_works_repeatedly(hung: Hung, request: pytest.FixtureRequest) -> None:
    name = request.node.callspec.params["hung"]
    for _ in range(3):
        threads = by_signal(hung.process.pid)
        (training,) = (thread for thread in threads if thread.training)
        assert training.frames[-1].line == line_of(HANG, "globals()")
        assert name in [frame.function for frame in training.frames]
        assert [thread.own for thread in threads].count(False) == 2
    assert hung.process.poll() is None


@pytest.mark.parametrize("hung", ["in_c_with_the_interpreter_held"], indirect=True)
def test_signal_does_not_interrupt_the_scripts_own_sleep(hung: Hung) -> None:
    main = Path(f"/proc/{hung.process.pid}/task/{hung.process.pid}/status")

    def switches() -> str:
        (line,) = re.findall(r"^voluntary_ctxt_switches:\s*(\d+)", main.read_text(), re.MULTILINE)
        return str(line)

    by_signal(hung.process.pid)
    before = switches()  # only now it sleeps for certain
    by_signal(hung.process.pid)
    hung.rank()  # py-spy, where it is installed, interrupts nothing either
    assert switches() == before


@pytest.mark.parametrize("hung", ["in_sleep"], indirect=True)
def test_stopped_and_dead_ranks_are_named_as_such(hung: Hung) -> None:
    hung.process.send_signal(signal.SIGSTOP)
    eventually(lambda: psutil.Process(hung.process.pid).status() == psutil.STATUS_STOPPED, 10)
    done = hung.node.command("stacks")
    assert done.returncode == 5
    assert f"rank 0 (pid {hung.process.pid}): stopped: by a signal" in done.stdout
    assert "rank 0 has no stacks: stopped" in done.stderr
    hung.process.send_signal(signal.SIGCONT)
    assert hung.rank()["outcome"] == "answered"
    hung.process.kill()
    hung.process.wait()
    code, document = stacks(hung.node)
    assert (code, document["ranks"][0]["outcome"], document["finding"]) == (5, "gone", "rank 0 is gone")


@pytest.fixture
def skipping(node: Node, tmp_path: Path) -> Iterator[tuple[Node, str]]:
    """Four ranks of which rank 2 does not come to the fourth step's collective."""
    script = tmp_path / "skip.py"
    script.write_text(SKIP)
    node.start_daemon()
    with node.train(script=script, ranks=4, TORCHPERFD_RUN="skipping") as process:
        try:
            yield node, SKIP
        finally:
            ranks = psutil.Process(process.pid).children(recursive=True)
            process.kill()
            for rank in ranks:
                rank.kill()
            process.communicate()


def test_stacks_name_rank_that_skipped_a_collective_with_line(skipping: tuple[Node, str]) -> None:
    node, script = skipping
    line = line_of(script, "torch.ones(8)")
    wanted = re.compile(
        rf"^rank 2 is at skip\.py:({line - 1}|{line}) in compute; "
        rf"ranks 0-1,3 wait in all_reduce \(skip\.py:{line_of(script, 'dist.all_reduce')} in exchange\); "
        # torch's record is asked for once they have stood still for a while.
        r"rank 2 has not entered all_reduce number \d+ of default_pg \(1\)$",
        re.MULTILINE,
    )

    def reported() -> bool:
        done = node.command("stacks", timeout=60)
        return done.returncode == 0 and wanted.search(done.stdout) is not None

    eventually(lambda: node.metric("torchperfd_clients") == 4, 90, node.log)
    eventually(reported, 90, lambda: node.command("stacks", timeout=60).stdout)
    code, document = stacks(node, "--ranks", "1-2")
    assert (code, document["odd"]) == (0, [2])
    assert [rank["outcome"] for rank in document["ranks"]] == ["answered", "answered"]
    assert {rank["step"] for rank in document["ranks"]} == {4}
    os.kill(document["ranks"][1]["pid"], signal.SIGSTOP)
    code, document = stacks(node)
    assert (code, document["odd"]) == (5, [2])
    assert document["finding"].startswith("rank 2 is stopped; ranks 0-1,3 wait in all_reduce (skip.py:")
