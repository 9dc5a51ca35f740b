"""Several ranks, each in a process of its own."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from torchperfd_daemon import analysis
from torchperfd_daemon.analysis import RankFile, Request, Summary
from torchperfd_daemon.analysis.rank_processes import RankProcesses
from torchperfd_daemon.errors import TorchperfdError
from torchperfd_daemon.object_store import ObjectPath

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "trace_small.json"


def reader() -> psutil.Process:
    """Return the process that reads a trace now."""
    return max(psutil.Process().children(recursive=True), key=lambda child: child.create_time())


def test_analyse_killed_process_loses_only_its_rank(tmp_path: Path) -> None:
    pipe = tmp_path / "rank1.json"
    os.mkfifo(pipe)

    def kill() -> None:
        for _ in range(2):  # it is tried once more
            with pipe.open("wb"):  # opens once the rank is being read
                child = reader()
                child.kill()
            child.wait(30)

    killer = threading.Thread(target=kill)
    killer.start()
    files = [RankFile(rank, path) for rank, path in enumerate((GOLDEN, pipe, GOLDEN))]
    first, lost, last = analysis.analyse(files, Request(), workers=1)
    killer.join()
    assert isinstance(first, Summary)
    assert isinstance(lost, TorchperfdError)
    assert lost.problem.endswith("ended with -9")
    assert isinstance(last, Summary)
    assert last.operators == first.operators


def test_ask_after_worker_died_starts_another() -> None:
    request = (GOLDEN, Request())
    # A test before may have left one, such as a fork server.
    others = set(psutil.Process().children())
    with RankProcesses() as processes:
        assert processes.ask(request)[0] == 0
        (worker,) = set(psutil.Process().children()) - others
        worker.kill()
        assert processes.ask(request) == (-9, b"")
        assert processes.ask(request)[0] == 0
    assert set(psutil.Process().children()) <= others


def test_analyse_without_memory_says_so() -> None:
    found, again = analysis.analyse(
        [RankFile(0, GOLDEN), RankFile(1, GOLDEN)], Request(max_memory=1 << 20), workers=1
    )
    assert "does not fit into the memory allowed" in str(found)
    assert str(again) == str(found)


def test_analyse_without_memory_for_obstore_says_so() -> None:
    pytest.importorskip("obstore")
    files = [RankFile(0, ObjectPath("s3://nowhere", "rank0.json"))]
    (found,) = analysis.analyse(files, Request(max_memory=32 << 20), workers=1)
    assert isinstance(found, TorchperfdError)
    assert found.problem.startswith("obstore cannot be loaded")
    assert "--worker-memory" in found.remedy


def test_killed_worker_takes_the_process_it_forked_along(tmp_path: Path) -> None:
    pipe = tmp_path / "rank0.json"
    os.mkfifo(pipe)
    with RankProcesses() as processes, ThreadPoolExecutor(1) as pool:
        found = pool.submit(processes.ask, (pipe, Request()))
        with pipe.open("wb"):  # opens once the rank is being read, and holds its reader
            child = reader()
            parent = child.parent()
            assert parent is not None
            parent.kill()
            child.wait(30)
        assert found.result(30) == (-9, b"")
