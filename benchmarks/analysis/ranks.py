"""What the analysis of many ranks costs, in local processes and on the workers of Dask.

    python -m benchmarks.analysis.ranks [--ranks 8,16,32] [--events 200000]

Makes captures of so many ranks: eight different traces, each under the names of several ranks. Runs `analyze`
on each with two local processes, and on the largest with two workers of Dask, once more with one of them
killed after a third of the time. Prints the CPU time of the command with its processes, the peak memory of
the largest, and whether the answers are the same. Exits 1 when one differs, a process takes more than 300 MB,
or the CPU time is no straight line of the ranks.
"""

import argparse
import contextlib
import hashlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.analysis import synthetic
from benchmarks.judge import exit_code

EVENTS: Final = 200_000
RANKS: Final = (8, 16, 32)
MAX_MB: Final = 300.0
# By how much the cost of a rank among most ranks may exceed that among a quarter of them.
MAX_BEND: Final = 1.25
_TRACES: Final = 8
_WORKERS: Final = 2


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the command.

    Attributes:
        cpu_s: Of the command and all processes that it waited for.
        peak_mb: Of the largest of these.
    """

    answer: str
    cpu_s: float
    wall_s: float
    peak_mb: float


def analyze(directory: Path, *options: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "torchperfd", "analyze", str(directory), "--json", *options]
    return subprocess.Popen(command, stdout=(directory / "answer").open("wb"))


def finished(process: "subprocess.Popen[bytes]", directory: Path, began: float) -> Run:
    """Wait for a run.

    Raises:
        SystemExit: It failed.
    """
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"analyze ended with {process.returncode}")
    answer = (directory / "answer").read_bytes()
    (directory / "answer").unlink()
    return Run(
        hashlib.sha256(answer).hexdigest(),
        usage.ru_utime + usage.ru_stime,
        time.monotonic() - began,
        usage.ru_maxrss * 1024 / 1e6,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=lambda text: [int(each) for each in text.split(",")], default=RANKS)
    parser.add_argument("--events", type=int, default=EVENTS)
    parser.add_argument("--no-dask", action="store_true", help="only local processes")
    options = parser.parse_args()
    broken: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        traces = [Path(name) / f"trace{number}.json" for number in range(_TRACES)]
        for number, trace in enumerate(traces):
            synthetic.write(trace, options.events, number)
        print(f"{'ranks':>6} {'CPU s':>8} {'s/rank':>7} {'wall s':>7} {'MB':>5}", flush=True)
        per_rank: dict[int, float] = {}
        for ranks in options.ranks:
            directory = capture(traces, ranks)
            began = time.monotonic()
            run = finished(analyze(directory, "--workers", str(_WORKERS)), directory, began)
            each = per_rank[ranks] = run.cpu_s / ranks
            print(
                f"{ranks:>6} {run.cpu_s:>8.1f} {each:>7.2f} {run.wall_s:>7.1f} {run.peak_mb:>5.0f}",
                flush=True,
            )
            if run.peak_mb > MAX_MB:
                broken.append(f"{run.peak_mb:.0f} MB for {ranks} ranks, limit {MAX_MB:.0f}")
        if not options.no_dask:
            broken += _judge_dask(directory, run, ranks)
    few, most = min(per_rank, key=lambda each: abs(each - max(per_rank) / 4)), max(per_rank)
    bend = per_rank[most] / per_rank[few]
    print(f"a rank among {most} costs {bend:.2f} times one among {few}, limit {MAX_BEND}")
    if bend > MAX_BEND:
        broken.append(f"cost is not linear in ranks: {bend:.2f}")
    return exit_code(broken)


def capture(traces: Sequence[Path], ranks: int) -> Path:
    """Return a directory with a trace for each rank; of links, since only names distinguish most of them."""
    directory = traces[0].with_name(f"{ranks}-ranks")
    directory.mkdir()
    for rank in range(ranks):
        os.link(traces[rank % len(traces)], directory / f"rank{rank}.json")
    return directory


def _judge_dask(directory: Path, here: Run, ranks: int) -> list[str]:
    """Run on Dask, and again with a worker killed; return what differs."""
    broken: list[str] = []
    for is_killed in (False, True):
        with cluster() as (address, workers):
            began = time.monotonic()
            process = analyze(directory, "--dask", address)
            if is_killed:
                # About a third of the way, in the middle of a rank.
                time.sleep(here.wall_s / 3)
                os.kill(workers[0].pid, signal.SIGKILL)
            run = finished(process, directory, began)
            peaks = [peak_mb(worker.pid) for worker in workers[is_killed:]]
        is_same = run.answer == here.answer
        print(
            f"{ranks:>6} on Dask{', a worker killed' * is_killed}: {run.wall_s:.1f} s, "
            f"command {run.peak_mb:.0f} MB, worker {max(peaks):.0f} MB, "
            f"{'the same answer' if is_same else 'ANOTHER ANSWER'}",
            flush=True,
        )
        broken += [] if is_same else ["another answer on Dask"]
        if (peak := max(run.peak_mb, *peaks)) > MAX_MB:
            broken.append(f"{peak:.0f} MB on Dask, limit {MAX_MB:.0f}")
    return broken


@contextlib.contextmanager
def cluster() -> "Iterator[tuple[str, list[subprocess.Popen[bytes]]]]":
    """Run a scheduler and two workers, each a process of its own."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    scheduler = _started("dask_scheduler", "--host", address, "--no-jupyter")
    options = ("--no-nanny", "--nthreads", "1", "--host", "127.0.0.1")
    workers = [_started("dask_worker", address, *options) for _ in range(_WORKERS)]
    try:
        yield address, workers
    finally:
        for process in (*workers, scheduler):
            process.kill()
            process.wait()


def _started(module: str, *arguments: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", f"distributed.cli.{module}", *arguments, "--no-dashboard"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def peak_mb(pid: int) -> float:
    """Return the most memory that a running process has had."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (kib,) = (line.split()[1] for line in lines if line.startswith("VmHWM:"))
    return int(kib) * 1024 / 1e6


if __name__ == "__main__":
    sys.exit(main())
