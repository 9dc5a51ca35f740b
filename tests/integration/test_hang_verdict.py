"""Real ranks that hang: the daemon names whose fault it is and where; not so of a long checkpoint."""

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.support.node import Node, eventually, free_port, new_node, side_by_side

pytestmark = pytest.mark.slow

RANKS = 3
HANGS_WITHIN_S = 120
"""How long a test waits for the verdict; on a machine that is not overloaded it takes fifteen seconds."""

SCRIPT = """
import ctypes, io, sys, time, torch, torch.distributed as dist
from datetime import timedelta

class SlowFile(io.BytesIO):
    def write(self, data):
        if not self.tell():
            time.sleep(15)
        return super().write(data)

def stray():
    while True:
        torch.ones(8).sum()

def stuck():
    ctypes.PyDLL(None).usleep(600_000_000)  # PyDLL keeps the interpreter

def share(metric):
    dist.all_reduce(metric)

fault = sys.argv[1]
dist.init_process_group("gloo", timeout=timedelta(seconds=600))
rank = dist.get_rank()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(10**9):
    optimizer.zero_grad()
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    time.sleep(0.02)
    if step == 100 and rank == 0 and fault == "save":
        torch.save(model.state_dict(), SlowFile())
        print("saved", flush=True)
    if step == 100 and rank == 1 and fault == "skip":
        stray()
    if step == 100 and rank == 1 and fault == "held":
        stuck()
    share(torch.ones(1))
"""


@contextmanager
def job(node: Node, directory: Path, fault: str) -> Iterator[Any]:
    """Run the script on all ranks; they are killed with their node."""
    script = directory / "train.py"
    script.write_text(SCRIPT)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--master-port", str(free_port()))
    wanted = ("--nproc-per-node", str(RANKS), "-m", "torchperfd", "run", str(script), fault)
    node.start_daemon()
    with node.running(*torchrun, *wanted, TORCHPERFD_RUN="hangs") as process:
        yield process


def pids(node: Node) -> dict[int, int]:
    ranks = [rank for run in node.json("ps")["runs"] for rank in run["ranks"]]
    return {rank["rank"]: rank["pid"] for rank in ranks if rank["connected"]}


def verdict(node: Node) -> Any:
    verdicts = node.json("diagnose")["verdicts"]
    return verdicts[0] if verdicts else {"cause": ""}


def hangs(node: Node) -> bool:
    # The page first: a command takes a processor for a quarter of a second.
    return node.metric('torchperfd_train_verdict{cause="hang"') == 1 and verdict(node)["cause"] == "hang"


def hang(node: Node) -> Any:
    eventually(lambda: hangs(node), HANGS_WITHIN_S, node.log)
    return verdict(node)


def line_of(text: str) -> int:
    (number,) = (number for number, line in enumerate(SCRIPT.splitlines(), start=1) if text in line)
    return number


def skips_a_collective(node: Node, directory: Path) -> None:
    with job(node, directory, "skip"):
        found = hang(node)
        assert found["rank"] == 1
        line = line_of("torch.ones(8)")
        assert re.search(
            rf"rank 1 is at train\.py:({line - 1}|{line}) in stray; "
            rf"ranks 0,2 wait in all_reduce \(train\.py:{line_of('dist.all_reduce')} in share\); "
            rf"rank 1 has not entered all_reduce number \d+ of default_pg \(1\)$",
            found["evidence"],
        ), found["evidence"]
        assert found["next_command"].startswith("torchperfd stacks --run ")
        assert node.log().count("hang · rank 1") == 1
        assert node.metric('torchperfd_train_verdict{cause="hang"') == 1
        lost = 'torchperfd_train_lost_seconds_total{cause="hang"'
        eventually(lambda: (node.metric(lost) or 0) > 0, 30, node.log)


def is_stopped(node: Node, directory: Path) -> None:
    with job(node, directory, "none"):
        eventually(lambda: (node.metric("torchperfd_train_steps_total") or 0) > 50, 90, node.log)
        stopped = pids(node)[2]
        os.kill(stopped, signal.SIGSTOP)
        found = hang(node)
        assert found["rank"] == 2
        assert "rank 2 is stopped; " in found["evidence"]
        assert "has not entered" not in found["evidence"]
        os.kill(stopped, signal.SIGCONT)
        eventually(lambda: not hangs(node), 60, node.log)
        assert verdict(node)["cause"] != "hang"


def saves_a_checkpoint(node: Node, directory: Path) -> None:
    with job(node, directory, "save") as process:
        assert process.stdout.readline() == "saved\n"
        steps = node.metric("torchperfd_train_steps_total") or 0
        eventually(lambda: (node.metric("torchperfd_train_steps_total") or 0) > steps + 20, 60, node.log)
        assert " hang " not in node.log()


Outcomes = dict[str, Future[None]]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """How each job came out; all at once, each on a node of its own, since most of their time is silence."""

    scenarios = (skips_a_collective, is_stopped, saves_a_checkpoint)
    # Before there are threads: pytest makes the one that holds them all at the first call.
    directories = {each.__name__: tmp_path_factory.mktemp(each.__name__) for each in scenarios}

    def play(scenario: Callable[[Node, Path], None]) -> None:
        with new_node() as node:
            scenario(node, directories[scenario.__name__])

    return side_by_side({each.__name__: partial(play, each) for each in scenarios})


def test_verdict_names_rank_that_skips_a_collective_with_line(outcomes: Outcomes) -> None:
    outcomes["skips_a_collective"].result()


def test_a_stopped_rank_is_the_verdict_until_it_goes_on(outcomes: Outcomes) -> None:
    outcomes["is_stopped"].result()


def test_a_checkpoint_of_a_quarter_of_a_minute_is_no_hang(outcomes: Outcomes) -> None:
    outcomes["saves_a_checkpoint"].result()


@pytest.mark.needs("py-spy")
def test_hang_in_c_names_rank_and_line(node: Node, tmp_path: Path) -> None:
    with job(node, tmp_path, "held"):
        found = hang(node)
    assert found["rank"] == 1
    assert f"rank 1 is at train.py:{line_of('usleep')} in stuck; ranks 0,2 wait in" in found["evidence"]
