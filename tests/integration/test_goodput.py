"""Goodput against a wall clock: a real loop, killed and resumed, and a daemon killed as well."""

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from tests.support.node import Node, eventually

pytestmark = pytest.mark.slow

# Notes moments of its own: when its first step began, and what it spent where.
SCRIPT = """
import json, os, sys, time
import torch
from torch.utils.data import DataLoader, Dataset

class Slow(Dataset):
    def __len__(self):
        return 100_000
    fetched = 0.0
    def __getitem__(self, index):
        before = time.time()
        time.sleep(0.01)
        Slow.fetched += time.time() - before
        return torch.randn(8)

model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
steps = int(sys.argv[1])
for number, batch in enumerate(DataLoader(Slow(), batch_size=2)):
    if number == 0:
        began = time.time()
    optimizer.zero_grad()
    model(batch).sum().backward()
    time.sleep(0.02)
    optimizer.step()
    if number % 20 == 10:
        torch.save(model.state_dict(), sys.argv[2] + ".pt")
    # At once: it is read, and this process killed, at any moment.
    with open(sys.argv[2] + ".part", "w") as notes:
        json.dump({"began": began, "ended": time.time(), "steps": number + 1, "fetched": Slow.fetched}, notes)
    os.replace(sys.argv[2] + ".part", sys.argv[2])
    if number + 1 == steps:
        break
"""


def notes(path: Path) -> dict[str, float]:
    """Return what a script has noted; nothing before its first step has ended."""
    found: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}
    return found


def test_buckets_sum_to_wall_time_across_rank_and_daemon_kills(node: Node) -> None:
    script, first, second = (node.directory / name for name in ("train.py", "first.json", "second.json"))
    script.write_text(SCRIPT)
    node.start_daemon()

    started = time.time()
    with node.train("0", str(first), script=script, TORCHPERFD_RUN="resumed") as process:
        eventually(lambda: notes(first).get("steps", 0) >= 40, 200, node.log)
        node.stop_daemon(signal.SIGKILL)
        while_away = notes(first)["steps"]
        eventually(lambda: notes(first)["steps"] > while_away + 10, 60)
        node.start_daemon()
        # Of a process that dies before the new daemon samples it, only the last sample is known.
        eventually(lambda: node.metric("torchperfd_train_goodput_seconds_total{") is not None, 60, node.log)
        process.kill()
        process.communicate()
    killed = time.time()
    before_kill = notes(first)

    time.sleep(2)  # the pause is what is measured
    resumed = time.time()
    with node.train("80", str(second), script=script, TORCHPERFD_RUN="resumed") as process:
        output = process.communicate(timeout=200)
    ended = time.time()
    assert process.returncode == 0, output
    after = notes(second)

    def goodput() -> Any:
        (run,) = node.json("goodput", "--run", "resumed")["runs"]
        return run

    eventually(lambda: not goodput()["ranks"][0]["running"], 60, node.log)
    run = goodput()
    seconds = run["bucket_seconds"]
    wall = ended - started
    assert sum(seconds.values()) == pytest.approx(wall, rel=0.005)
    assert run["rank_seconds"] == pytest.approx(
        run["until_unix_seconds"] - run["since_unix_seconds"], abs=1e-6
    )
    assert run["restarts"] == 1
    assert seconds["restart_gap"] == pytest.approx(resumed - killed, abs=0.05)
    start_up = (before_kill["began"] - started) + (after["began"] - resumed)
    # A step begins with its draw, which the script cannot note.
    assert seconds["start_up"] == pytest.approx(start_up, abs=0.5)
    assert seconds["shutdown"] == pytest.approx(ended - after["ended"], abs=0.5)
    # The last second of the killed process was never reported.
    fetched = before_kill["fetched"] + after["fetched"]
    assert fetched - 1.5 < seconds["data_wait"] < fetched + 0.5 * wall
    assert seconds["checkpoint"] > 0
    assert seconds["stall"] == seconds["validation"] == seconds["communication_wait"] == 0
