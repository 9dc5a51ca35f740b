"""Real ranks that hang: the daemon names whose fault it is and where; not so of a long checkpoint."""

import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.node import Node, eventually, free_port

RANKS = 3
HANGS_WITHIN_S = 120
"""How long a test waits for the verdict; on a machine that is not overloaded it takes fifteen seconds."""

SCRIPT = """
import io, sys, time, torch, torch.distributed as dist
from datetime import timedelta

class SlowFile(io.BytesIO):
    def write(self, data):
        if not self.tell():
            time.sleep(15)
        return super().write(data)

def stray():
    while True:
        torch.ones(8).sum()

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
    share(torch.ones(1))
"""


@contextmanager
def job(node: Node, directory: Path, fault: str) -> Iterator[Any]:
    """Run the script on all ranks; they are killed at the end."""
    script = directory / "train.py"
    script.write_text(SCRIPT)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--master-port", str(free_port()))
    wanted = ("--nproc-per-node", str(RANKS), "-m", "torchperfd", "run", str(script), fault)
    node.start_daemon()
    with node.running(*torchrun, *wanted, TORCHPERFD_RUN_ID="hangs") as process:
        try:
            yield process
        finally:
            for rank in pids(node).values():
                os.kill(rank, signal.SIGKILL)
            process.kill()
            process.communicate()


def pids(node: Node) -> dict[int, int]:
    ranks = [rank for run in node.json("ps")["runs"] for rank in run["ranks"]]
    return {rank["rank"]: rank["pid"] for rank in ranks if rank["connected"]}


def verdict(node: Node) -> Any:
    verdicts = node.json("diagnose")["verdicts"]
    return verdicts[0] if verdicts else {"cause": ""}


def hang(node: Node) -> Any:
    eventually(lambda: verdict(node)["cause"] == "hang", HANGS_WITHIN_S, node.log)
    return verdict(node)


def line_of(text: str) -> int:
    (number,) = (number for number, line in enumerate(SCRIPT.splitlines(), start=1) if text in line)
    return number


def test_the_rank_that_skips_a_collective_is_the_verdict_with_its_line(node: Node, tmp_path: Path) -> None:
    with job(node, tmp_path, "skip"):
        found = hang(node)
        assert found["rank"] == 1
        line = line_of("torch.ones(8)")
        assert re.search(
            rf"rank 1 is at train\.py:({line - 1}|{line}) in stray; "
            rf"ranks 0,2 wait in all_reduce \(train\.py:{line_of('dist.all_reduce')} in share\)$",
            found["evidence"],
        ), found["evidence"]
        assert found["next_command"].startswith("torchperfd stacks --run ")
        assert node.log().count("hang · rank 1") == 1
        assert node.metric('torchperfd_train_verdict{cause="hang"') == 1
        lost = 'torchperfd_train_lost_seconds_total{cause="hang"'
        eventually(lambda: (node.metric(lost) or 0) > 0, 30, node.log)


def test_a_stopped_rank_is_the_verdict_until_it_goes_on(node: Node, tmp_path: Path) -> None:
    with job(node, tmp_path, "none"):
        eventually(lambda: (node.metric("torchperfd_train_steps_total") or 0) > 50, 90, node.log)
        stopped = pids(node)[2]
        os.kill(stopped, signal.SIGSTOP)
        found = hang(node)
        assert found["rank"] == 2
        assert "rank 2 is stopped; " in found["evidence"]
        os.kill(stopped, signal.SIGCONT)
        eventually(lambda: verdict(node)["cause"] != "hang", 60, node.log)


def test_a_checkpoint_of_a_quarter_of_a_minute_is_no_hang(node: Node, tmp_path: Path) -> None:
    with job(node, tmp_path, "save") as process:
        assert process.stdout.readline() == "saved\n"
        steps = node.metric("torchperfd_train_steps_total") or 0
        eventually(lambda: (node.metric("torchperfd_train_steps_total") or 0) > steps + 20, 60, node.log)
        assert " hang " not in node.log()
