"""What the analysis of many ranks costs, in local processes and on the workers of Dask.

    python -m benchmarks.analysis.ranks [--ranks 8,16,32] [--events 200000] [--dask none|whole|killed|both]

Makes captures of so many ranks: eight different traces, each under the names of several ranks. Runs `analyze`
on each with two local processes, and on the largest with two workers of Dask, whole and with one of them
killed after a third of the time. Prints the CPU time of the command with its processes, the line that fits
the times best, the peak memory of the command, of the workers and of their children, and whether the answers
are the same. Exits 1 when one differs, a process takes more than 300 MB, or the CPU time is no straight line
of the ranks.
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
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from benchmarks.analysis import synthetic
from benchmarks.judge import exit_code

EVENTS: Final = 200_000
RANKS: Final = (8, 16, 32)
MAX_MB: Final = 300.0
# By how much the cost of a rank among most ranks may exceed that among a quarter of them.
MAX_BEND: Final = 1.25
MAX_START_S: Final = 120.0
_TRACES: Final = 8
_WORKERS: Final = 2
_SAMPLE_S: Final = 0.05


# For each choice of --dask, whether a worker is killed in its runs.
_KILLS: Final[dict[str, tuple[bool, ...]]] = {
    "none": (),
    "whole": (False,),
    "killed": (True,),
    "both": (False, True),
}


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
    parser.add_argument("--dask", choices=_KILLS, default="both", help="the runs on Dask, none for none")
    options = parser.parse_args()
    # So that the workers end with it, and the files go.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    broken: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        traces = [Path(name) / f"trace{number}.json" for number in range(_TRACES)]
        for number, trace in enumerate(traces):
            synthetic.write(trace, options.events, number)
        print(f"{'ranks':>6} {'CPU s':>8} {'s/rank':>7} {'wall s':>7} {'MB':>5}", flush=True)
        runs: dict[int, Run] = {}
        for ranks in options.ranks:
            directory = capture(traces, ranks)
            began = time.monotonic()
            run = finished(analyze(directory, "--workers", str(_WORKERS)), directory, began)
            runs[ranks] = run
            print(
                f"{ranks:>6} {run.cpu_s:>8.1f} {run.cpu_s / ranks:>7.2f} {run.wall_s:>7.1f}"
                f" {run.peak_mb:>5.0f}",
                flush=True,
            )
            if run.peak_mb > MAX_MB:
                broken.append(f"{run.peak_mb:.0f} MB for {ranks} ranks, limit {MAX_MB:.0f}")
        broken += _judge_line(runs)
        broken += _judge_dask(directory, run, ranks, _KILLS[options.dask])
    return exit_code(broken)


def _judge_line(runs: dict[int, Run]) -> list[str]:
    """Print the lines that fit the times, and the cost of a rank among many; return what is broken."""
    if len(runs) > 2:
        _print_line("CPU time", {ranks: run.cpu_s for ranks, run in runs.items()})
        _print_line("wall time", {ranks: run.wall_s for ranks, run in runs.items()})
    per_rank = {ranks: run.cpu_s / ranks for ranks, run in runs.items()}
    few, most = min(per_rank, key=lambda each: abs(each - max(per_rank) / 4)), max(per_rank)
    bend = per_rank[most] / per_rank[few]
    print(f"a rank among {most} costs {bend:.2f} times one among {few}, limit {MAX_BEND}", flush=True)
    return [f"cost is not linear in ranks: {bend:.2f}"] if bend > MAX_BEND else []


def _print_line(what: str, seconds: dict[int, float]) -> None:
    ranks, taken = np.array(list(seconds)), np.array(list(seconds.values()))
    slope, start = np.polyfit(ranks, taken, 1)
    apart = np.abs(taken / (start + slope * ranks) - 1).max()
    print(f"{what}: {start:.2f} s + {slope:.3f} s a rank, no run more than {apart:.0%} apart")


def capture(traces: Sequence[Path], ranks: int) -> Path:
    """Return a directory with a trace for each rank; of links, since only names distinguish most of them."""
    directory = traces[0].with_name(f"{ranks}-ranks")
    directory.mkdir()
    for rank in range(ranks):
        os.link(traces[rank % len(traces)], directory / f"rank{rank}.json")
    return directory


def _judge_dask(directory: Path, here: Run, ranks: int, kills: Sequence[bool]) -> list[str]:
    """Run on Dask, whole or with a worker killed; return what differs."""
    broken: list[str] = []
    for is_killed in kills:
        with cluster() as (address, workers), Peaks([worker.pid for worker in workers]) as peaks:
            began = time.monotonic()
            process = analyze(directory, "--dask", address)
            if is_killed:
                # About a third of the way, in the middle of a rank.
                until = began + MAX_START_S
                while time.monotonic() < until and not any(descendants(workers[0].pid)):
                    time.sleep(_SAMPLE_S)
                time.sleep(here.wall_s / 3)
                os.kill(workers[0].pid, signal.SIGKILL)
            run = finished(process, directory, began)
        is_same = run.answer == here.answer
        print(
            f"{ranks:>6} on Dask{', a worker killed' * is_killed}: {run.wall_s:.1f} s, "
            f"command {run.peak_mb:.0f} MB, worker {peaks.worker_mb:.0f} MB, its children "
            f"{peaks.child_mb:.0f} MB, {'the same answer' if is_same else 'ANOTHER ANSWER'}",
            flush=True,
        )
        broken += [] if is_same else ["another answer on Dask"]
        if (peak := max(run.peak_mb, peaks.worker_mb, peaks.child_mb)) > MAX_MB:
            broken.append(f"{peak:.0f} MB on Dask, limit {MAX_MB:.0f}")
    return broken


class Peaks:
    """Samples the peak memory of some processes and of all their descendants while its context is open.

    The kernel keeps the peak of a process only as long as it lives, and each rank is analysed by a process of
    its own. What that takes after its last sample is missed.

    Attributes:
        worker_mb: Of the largest of the processes.
        child_mb: Of the largest of their descendants.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self.worker_mb = self.child_mb = 0.0

    def __enter__(self) -> "Peaks":
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._is_over.wait(_SAMPLE_S):
            for pid in self._pids:
                self.worker_mb = max(self.worker_mb, peak_mb(pid))
                self.child_mb = max([self.child_mb, *map(peak_mb, descendants(pid))])


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


def descendants(pid: int) -> Iterator[int]:
    """Yield the processes below one, as far as they live."""
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, path.read_text().split()):
                yield child
                yield from descendants(child)


def peak_mb(pid: int) -> float:
    """Return the most memory that a process has had; 0 for one that has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return max(
        (int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith("VmHWM:")), default=0.0
    )


if __name__ == "__main__":
    sys.exit(main())
