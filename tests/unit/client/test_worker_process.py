"""The process that measures: its answers, its deadline, its memory, and what it leaves."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.support.node import eventually

from torchperfd_cli.bench.worker_process import WorkerFailedError, WorkerProcess, free_and_total_memory

MIB = 1 << 20
MEMINFO = "MemTotal:        8388608 kB\nMemFree:  100000 kB\nMemAvailable:    4194304 kB\n"


def worker(behaviour: str, free: int = 800, total: int = 900) -> WorkerProcess:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return WorkerProcess("tests.support.silent_worker", [behaviour], lambda: (free, total), environment)


@pytest.fixture
def group(tmp_path: Path) -> Path:
    (tmp_path / "memory.max").write_text(f"{1024 * MIB}\n")
    (tmp_path / "memory.current").write_text(f"{900 * MIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon 1\ninactive_file {300 * MIB}\nactive_file 5\n")
    return tmp_path


@pytest.fixture
def meminfo(tmp_path: Path) -> Path:
    path = tmp_path / "meminfo"
    path.write_text(MEMINFO)
    return path


@pytest.fixture
def answering() -> Iterator[WorkerProcess]:
    process = worker("answers")
    yield process
    process.close()


def test_answers_come_in_the_order_of_the_requests(answering: WorkerProcess) -> None:
    for number in range(3):
        assert answering.ask({"number": number}, 20) == {"asked": {"number": number}}


def test_answer_longer_than_a_pipe_is_read_whole(answering: WorkerProcess) -> None:
    text = "x" * 100_000
    assert answering.ask({"text": text[:60_000]}, 20) == {"asked": {"text": text[:60_000]}}


@pytest.mark.parametrize(
    ("does", "options", "seconds", "reason"),
    [
        ("silent", {}, 0.5, "no answer within 500 ms"),
        ("ends", {}, 60, "its process ended without an answer"),
        ("silent", {"free": 44}, 60, "stopped before memory ran out: 44 B of 900 B were free"),
    ],
)
def test_process_without_an_answer_is_ended(
    does: str, options: dict[str, int], seconds: float, reason: str
) -> None:
    process = worker(does, **options)
    with pytest.raises(WorkerFailedError, match=reason):
        process.ask(None, seconds)


def test_close_ends_children_as_well() -> None:
    process = worker("leaves a child")
    child = process.ask(None, 20)["child"]
    process.close()
    eventually(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == "zombie", 5)


def test_no_descriptor_is_left(answering: WorkerProcess) -> None:
    answering.ask({}, 20)
    before = len(os.listdir("/proc/self/fd"))
    other = worker("answers")
    other.ask({}, 20)
    other.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_memory_is_the_machines_without_a_limit(meminfo: Path, tmp_path: Path) -> None:
    assert free_and_total_memory(meminfo, tmp_path / "no group") == (4096 * MIB, 8192 * MIB)


def test_memory_is_the_groups_where_that_is_less(meminfo: Path, group: Path) -> None:
    """Files that were only read count as free: a loader reads many."""
    assert free_and_total_memory(meminfo, group) == ((1024 - 900 + 300) * MIB, 1024 * MIB)


def test_group_without_a_limit_has_the_machines_memory(meminfo: Path, group: Path) -> None:
    (group / "memory.max").write_text("max\n")
    assert free_and_total_memory(meminfo, group) == (4096 * MIB, 8192 * MIB)
