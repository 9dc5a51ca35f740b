"""Captures in an object store, analysed by their URL, in local processes and on the workers of Dask."""

import asyncio
import gzip
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from benchmarks.analysis import synthetic
from tests.object_store import BUCKET, ObjectStore
from tests.support.node import ROOT, eventually, free_port
from tests.unit.daemon.kept import add
from tests.unit.test_doc_examples import blocks

from torchperfd_daemon.captures.catalog import Catalog
from torchperfd_daemon.captures.destination import Destination
from torchperfd_daemon.captures.uploader import upload

RANKS = 5
LOST, CUT = 2, 3
CAPTURE = "20260101-120000-abcd"
URL = f"s3://{BUCKET}/cluster-a/{CAPTURE}"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    """A store with an uploaded capture: plain and compressed traces, one cut off, and one lost since."""
    directory = tmp_path_factory.mktemp("store")
    store = ObjectStore(directory)
    try:
        store.start()
        with pytest.MonkeyPatch.context() as patch:
            for name, value in store.environment.items():
                patch.setenv(name, value)
            catalog = Catalog(directory / "captures")
            add(catalog, CAPTURE, dict(enumerate(traces(directory / "trace.json"))), world_size=RANKS)
            asyncio.run(upload(catalog, Destination(f"s3://{BUCKET}/cluster-a"), CAPTURE))
        store.delete(f"cluster-a/{CAPTURE}/rank{LOST}.json")
        yield store
    finally:
        store.stop()


def traces(path: Path) -> Iterator[bytes]:
    for rank in range(RANKS):
        synthetic.write(path, 16_000, rank)
        content = path.read_bytes()
        if rank % 2:
            content = gzip.compress(content, 1)
        yield content[: len(content) // 2] if rank == CUT else content


def python(store: ObjectStore, *arguments: object) -> "subprocess.Popen[str]":
    """Start Python with the store's credentials in its environment."""
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        env={**os.environ, **store.environment, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finished(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    with process:
        out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def analyze(store: ObjectStore, *arguments: str) -> tuple[int, str, str]:
    return finished(python(store, "-m", "torchperfd", "analyze", *arguments))


@pytest.fixture(scope="module")
def here(store: ObjectStore) -> dict[str, Any]:
    """The answer of local processes."""
    code, out, err = analyze(store, URL, "--json")
    assert code == 5, err
    cut, lost = err.splitlines()
    assert cut.startswith(f"torchperfd: {URL}/rank{CUT}.json is cut off or damaged")
    assert lost.startswith(f"torchperfd: 1 of {RANKS} ranks are missing ({LOST})")
    assert lost.endswith(f"{URL}/rank{LOST}.json")
    found: dict[str, Any] = json.loads(out)
    return found


def test_uploaded_capture_is_analysed_by_its_url(here: dict[str, Any]) -> None:
    ranks = {entry["rank"]: entry for entry in here["ranks"]}
    assert sorted(ranks) == [rank for rank in range(RANKS) if rank != LOST]
    assert [entry["rank"] for entry in here["failed"]] == [LOST]
    assert [rank for rank, entry in ranks.items() if entry["trace"]["damaged"]] == [CUT]
    assert here["capture"]["capture_id"] == CAPTURE
    assert ranks[0]["trace"]["path"] == f"{URL}/rank0.json"
    assert ranks[0]["trace"]["events"] == ranks[1]["trace"]["events"]
    assert ranks[0]["trace"]["bytes"] > 3 * ranks[1]["trace"]["bytes"]


@pytest.fixture
def scheduler(store: ObjectStore) -> Iterator[str]:
    address = f"tcp://127.0.0.1:{free_port()}"
    quiet = ("--no-dashboard", "--no-jupyter")
    process = python(store, "-m", "distributed.cli.dask_scheduler", "--host", address, *quiet)
    try:
        yield address
    finally:
        process.kill()
        finished(process)


@pytest.fixture
def workers(store: ObjectStore, scheduler: str) -> Iterator[list[psutil.Process]]:
    """Two workers of Dask, each a process of its own that analyses one rank at a time."""
    options = ("--no-nanny", "--nthreads", 1, "--no-dashboard", "--host", "127.0.0.1")
    started = [python(store, "-m", "distributed.cli.dask_worker", scheduler, *options) for _ in range(2)]
    try:
        yield [psutil.Process(each.pid) for each in started]
    finally:
        for each in started:
            each.kill()
            finished(each)


@pytest.mark.slow
def test_ranks_on_dask_have_the_same_answer(
    store: ObjectStore, here: dict[str, Any], scheduler: str, workers: list[psutil.Process]
) -> None:
    """Also when a worker is killed in the middle of a rank."""
    code, out, err = analyze(store, URL, "--json", "--dask", scheduler)
    assert code == 5, err
    assert json.loads(out) == here
    again = python(store, "-m", "torchperfd", "analyze", URL, "--json", "--dask", scheduler)
    # Besides the process that forks there is one that analyses a rank.
    while len(workers[0].children(recursive=True)) < 2:
        assert again.poll() is None, "all ranks were done before the worker could be killed"
    workers[0].kill()
    code, out, err = finished(again)
    assert code == 5, err
    assert json.loads(out) == here


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ((f"s3://{BUCKET}/nothing",), 3, f"there is no object at s3://{BUCKET}/nothing"),
        ((f"s3://{BUCKET}/cluster-a",), 3, "holds no trace"),
        (("s3://elsewhere/x",), 1, "cannot read s3://elsewhere/x: The specified bucket does not exist"),
    ],
)
def test_url_that_cannot_be_read_is_an_error_of_one_line(
    store: ObjectStore, arguments: tuple[str, ...], code: int, said: str
) -> None:
    got, out, err = analyze(store, *arguments)
    assert (got, out, err.count("\n")) == (code, "", 1)
    assert said in err


LOOPBACK = "{'host': '127.0.0.1', 'dashboard': False}"
SBATCH = """#!/bin/sh
cp "$1" job.sh  # the caller deletes it
setsid bash job.sh >worker.log 2>&1 &
echo $! >>workers
echo Submitted batch job $!
"""


@pytest.mark.slow
def test_page_starts_workers_by_slurm(tmp_path: Path) -> None:
    """The stand-in for sbatch runs the job's script, which is a worker, on this machine."""
    for rank in range(2):
        synthetic.write(tmp_path / f"rank{rank}.json", 2_000, rank)
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, script in {"sbatch": SBATCH, "scancel": "#!/bin/sh\n"}.items():
        (programs / name).write_text(script)
        (programs / name).chmod(0o755)
    (block,) = (text for text in blocks(ROOT / "docs" / "analysis.md") if "SLURMCluster(" in text)
    for shown, here in {
        "cores=16": "cores=1",
        "64GiB": "1GiB",
        "jobs=4": "jobs=1",
        "s3://traces/cluster-a/CAPTURE_ID": str(tmp_path),
    }.items():
        assert shown in block
        block = block.replace(shown, here)
    path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        [sys.executable, "-c", block],
        cwd=tmp_path,
        env={**os.environ, "PATH": path, "DASK_JOBQUEUE__SLURM__SCHEDULER_OPTIONS": LOOPBACK},
        capture_output=True,
        text=True,
        timeout=120,
    )
    workers = [int(number) for number in (tmp_path / "workers").read_text().split()]
    eventually(lambda: not any(map(psutil.pid_exists, workers)), 30)
    assert "collectives found on several of 2 ranks" in done.stdout, done.stderr


READER = """
import sys
from torchperfd_daemon import object_store
from torchperfd_daemon.errors import TorchperfdError
path = object_store.find(sys.argv[1])
with path.open() as file:
    print(len(file.peek(1)), flush=True)
    input()
    try:
        while file.read(1 << 20):
            pass
    except TorchperfdError as error:
        print(error)
"""


def test_object_replaced_while_it_is_read_is_an_error(store: ObjectStore) -> None:
    store.put("large.json", os.urandom(1 << 20))
    process = python(store, "-c", READER, f"s3://{BUCKET}/large.json")
    assert process.stdout is not None
    assert int(process.stdout.readline()) <= 1 << 17, "of an object as little is read as a header takes"
    store.put("large.json", os.urandom(1 << 20))
    with process:
        out, err = process.communicate("\n", timeout=30)
    assert out == f"s3://{BUCKET}/large.json was replaced while it was read; analyse it again\n", err
