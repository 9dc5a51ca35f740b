"""Daemons without configured peers find each other through the ranks of their job."""

import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.node import Node, eventually, free_port, new_node

pytestmark = pytest.mark.slow

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
    time.sleep(0.01)
"""


def listed(node: Node) -> Any:
    runs = node.json("ps", "--fleet")["runs"]
    return [rank["rank"] for run in runs for rank in run["ranks"] if rank["connected"]]


def test_daemons_find_each_other_through_the_ranks_they_watch(tmp_path: Path) -> None:
    script = tmp_path / "pair.py"
    script.write_text(SCRIPT)
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    command = (
        sys.executable,
        "-m",
        "torchperfd",
        "run",
        "--quiet",
        "--run",
        "both",
        "--job",
        "pair",
        str(script),
    )
    with new_node() as one, new_node() as two:
        for node in (one, two):
            address = f"127.0.0.1:{free_port()}"
            node.start_daemon("--fleet-address", address, "--fleet-peers", "job")
        assert listed(one) == []
        ranks = [
            node.running(*command, **store, RANK=str(rank), LOCAL_RANK="0")
            for rank, node in enumerate((one, two))
        ]
        with ranks[0] as first, ranks[1] as second:
            for node in (one, two):
                eventually(lambda node=node: listed(node) == [0, 1], 60, node.log)  # type: ignore[misc]
            for process in (second, first):
                process.kill()
                process.communicate()
        # Who trains no more has no peers.
        eventually(lambda: listed(one) == [], 60, one.log)
