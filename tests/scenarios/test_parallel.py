"""Pipeline and tensor parallelism on gloo: each rank's place is known, and stages are compared as such."""

import contextlib
import re
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from tests.integration.conftest import node
from tests.scenarios import parallel_ranks, tensor_parallel_ranks
from tests.support.node import Node, eventually, import_path, torchrun

pytestmark = [pytest.mark.slow, pytest.mark.serial]

__all__ = ["node"]

LONGER_S = 0.01
"""What the second stage waits in each micro-batch."""
SLOWER_S = 0.03
"""What the slow one of four tensor-parallel ranks waits in each forward."""
STEPS = 2000
WATCHED_S = 15.0
PLACES = {0: "pp=0 tp=0", 1: "pp=0 tp=1", 2: "pp=1 tp=0", 3: "pp=1 tp=1"}


@contextlib.contextmanager
def four_ranks(node: Node, script: ModuleType, longer_s: float) -> Iterator[None]:
    """Train four ranks under a daemon, until each has made some steps and for a while on."""
    node.start_daemon()
    command = [
        *torchrun(4),
        *("-m", "torchperfd", "run", str(script.__file__), str(longer_s), str(STEPS)),
    ]
    with node.running(
        *command,
        PYTHONPATH=import_path(),
        TORCHPERFD_RUN="split",
    ) as process:
        eventually(
            lambda: len(ranks(node)) == 4 and all(r["steps"] > 60 for r in ranks(node).values()),
            120,
            node.log,
        )
        time.sleep(WATCHED_S)
        yield
        process.terminate()
        process.communicate(timeout=60)


def ranks(job: Node) -> dict[int, dict[str, Any]]:
    runs = job.json("ranks")["runs"]
    return {rank["rank"]: rank for run in runs for rank in run["ranks"]}


@pytest.fixture
def split_job(node: Node) -> Iterator[Node]:
    """A job of two pipeline stages of two tensor-parallel ranks each."""
    with four_ranks(node, parallel_ranks, LONGER_S):
        yield node


@pytest.fixture
def tensor_parallel_job(node: Node) -> Iterator[Node]:
    """A job of four tensor-parallel ranks, of which the last is slow."""
    with four_ranks(node, tensor_parallel_ranks, SLOWER_S):
        yield node


def test_a_slow_tensor_parallel_rank_is_named(tensor_parallel_job: Node) -> None:
    reported = ranks(tensor_parallel_job)
    assert {rank: each["coordinates"] for rank, each in reported.items()} == {
        rank: f"tp={rank}" for rank in range(4)
    }
    assert [rank for rank, each in reported.items() if each["slow"]] == [3]
    [verdict] = tensor_parallel_job.json("diagnose")["verdicts"]
    assert (verdict["cause"], verdict["rank"], verdict["phase"]) == ("slow rank", 3, "forward"), verdict
    assert verdict["cost_seconds_per_step"] == pytest.approx(SLOWER_S, rel=0.1)


def test_stages_are_compared_as_stages(split_job: Node) -> None:
    job = split_job
    reported = ranks(job)
    assert {rank: each["coordinates"] for rank, each in reported.items()} == PLACES
    assert [rank for rank, each in reported.items() if each["slow"]] == []
    page = job.get("/metrics")[1]
    info = {
        int(labels["rank"]): (labels["pipeline_rank"], labels["tensor_rank"], labels["data_rank"])
        for line in page.splitlines()
        if line.startswith("torchperfd_train_rank_info{")
        for labels in [dict(re.findall(r'(\w+)="([^"]*)"', line))]
    }
    assert info == {0: ("0", "0", ""), 1: ("0", "1", ""), 2: ("1", "0", ""), 3: ("1", "1", "")}
    [verdict] = job.json("diagnose")["verdicts"]
    assert (verdict["cause"], verdict["rank"]) == ("pipeline imbalance", None), verdict
    # Beside what it waits, the second stage has the loss, and more of the backward. Of what it works longer,
    # two stages of the same length would save half.
    longer = reported[2]["own_seconds"] - reported[0]["own_seconds"]
    assert longer > parallel_ranks.MICRO_BATCHES * LONGER_S
    assert verdict["cost_seconds_per_step"] == pytest.approx(longer / 2, rel=0.2)
