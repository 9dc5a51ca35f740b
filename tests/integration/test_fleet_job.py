"""Daemons without configured peers find each other through the ranks of their job."""

from typing import Any

import pytest
from tests.support.node import Node, eventually, free_port, new_node

pytestmark = pytest.mark.slow


def listed(node: Node) -> Any:
    runs = node.json("ps", "--fleet")["runs"]
    return [rank["rank"] for run in runs for rank in run["ranks"] if rank["connected"]]


def test_daemons_find_each_other_through_the_ranks_they_watch() -> None:
    master_port = str(free_port())
    with new_node() as one, new_node() as two:
        for node in (one, two):
            address = f"127.0.0.1:{free_port()}"
            node.start_daemon("--fleet-address", address, "--fleet-peers", "job")
        assert listed(one) == []
        ranks = [
            node.train(
                *("--ddp", "--pause", "0.01"),
                options=("--quiet", "--run", "both", "--job", "pair"),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=master_port,
                WORLD_SIZE="2",
                RANK=str(rank),
                LOCAL_RANK="0",
            )
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
