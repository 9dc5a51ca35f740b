"""A rank with steps of a millisecond, which reports seldom: the daemon sees it go on, slow down and stop."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.node import Node, eventually, new_node

SCRIPT = """
import sys, time, torch, torchperfd
from pathlib import Path

# A machine may be faster or slower than the test expects, and ten thousand steps take their time.
torchperfd.pump._ENOUGH_STEPS = 500
torchperfd.pump._SHORT_STEPS_S = (0.0, 0.05)
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(6)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
word = Path(sys.argv[1])

for step in range(10**9):
    optimizer.zero_grad()
    model(torch.ones(32, 64)).sum().backward()
    optimizer.step()
    if step % 50 == 0:
        told = word.read_text()
    if told == "slow":
        time.sleep(0.002)
"""


def rank_of(node: Node) -> Any:
    (run,) = node.json("ps")["runs"]
    (rank,) = run["ranks"]
    return rank


def total(node: Node) -> float:
    return node.metric("torchperfd_train_steps_total") or 0


def newest(node: Node) -> float:
    return node.metric("torchperfd_train_last_step_timestamp_seconds") or 0


def stays(node: Node, seconds: float) -> bool:
    """Return whether no report comes for so long, and steps are made; not before there was one."""
    before, began = total(node), time.monotonic()
    while time.monotonic() - began < seconds:
        if total(node) != before or not before:
            return False
        assert time.time() - newest(node) < 3, "a step is seen within a second or two, reported or not"
        time.sleep(0.3)
    return True


def reports(node: Node, seconds: float) -> int:
    """Return how many reports come within so many seconds."""
    seen, until = {total(node)}, time.monotonic() + seconds
    while time.monotonic() < until:
        seen.add(total(node))
        time.sleep(0.2)
    return len(seen) - 1


@pytest.mark.needs("gcc")
def test_steps_that_are_reported_seldom_are_seen_all_the_same(tmp_path: Path) -> None:
    script, word = tmp_path / "train.py", tmp_path / "word"
    script.write_text(SCRIPT)
    word.write_text("go")
    with new_node() as node:
        node.start_daemon()
        with node.running(sys.executable, "-m", "torchperfd", "run", str(script), str(word)):
            eventually(lambda: stays(node, 6), 60, node.log)
            # Who looks has it report first.
            before = total(node)
            rank = rank_of(node)
            assert rank["steps"] > before
            word.write_text("slow")
            eventually(lambda: reports(node, 5) >= 3, 60, node.log)
            os.kill(rank["pid"], signal.SIGSTOP)
            eventually(lambda: node.metric('torchperfd_train_verdict{cause="hang"') == 1, 60, node.log)
            (verdict,) = node.json("diagnose")["verdicts"]
            assert "rank 0 is stopped" in verdict["evidence"]
