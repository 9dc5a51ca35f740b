"""Run the contest and judge it.

    make bench-overhead
    python -m benchmarks.overhead --ddp
    python -m benchmarks.overhead --quick

Prints one row per contestant: the CPU time of the training thread that it adds to a step
(median and deciles over rounds), how many times ours that is, and by how much the median
of the steps' wall times changes. The first row, without a profiler, is the noise of the measurement.
Then, in blocks of a few steps, by how much the 99th percentile changes. Exits 1 when
torchperfd adds more than 8 µs, raises the 99th percentile by 1 % or more, or is not 15
times cheaper than TraceML, or not 2.5 times cheaper than Lightning's SimpleProfiler.
With --ddp the loop is that of a rank of DistributedDataParallel, on gloo: then torchperfd
times its collectives as well, within the same limits.
"""

import argparse
import contextlib
import itertools
import math
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import torch
from benchmarks.overhead import peers
from benchmarks.overhead.contestants import CONTESTANTS, Contestant
from benchmarks.overhead.tail import measure_tail
from benchmarks.overhead.worker import Round, measure
from tests.support.node import ROOT, Node, free_port

LIMIT_US: Final = 8.0
LIMIT_P99: Final = 0.01
TIMES_CHEAPER: Final = {"TraceML": 15.0, "Lightning SimpleProfiler": 2.5}
OURS: Final = "torchperfd"
NOBODY: Final = "nothing (A/A)"
_PROCESSES: Final = 3  # Where the memory of a process happens to lie is worth a microsecond or two.
_TAIL_STEPS: Final = 1500
_TAIL_S: Final = 60.0  # Getting ready takes a round half a minute of its own.
_START_S: Final = 120.0
_ANSWER_S: Final = 150.0


class Worker:
    """A contestant's process and the line to it."""

    def __init__(
        self, name: str, steps: int, directory: Path, env: Mapping[str, str], *, replicated: bool
    ) -> None:
        self.failure = ""
        self.version = ""
        self._connection: Connection | None = None
        address = str(directory / f"{len(list(directory.iterdir()))}.sock")
        with (
            socket.socket(socket.AF_UNIX) as server,
            (directory / f"{Path(address).stem}.log").open("wb") as log,
        ):
            server.bind(address)
            server.listen(1)
            server.settimeout(1.0)
            self._process = subprocess.Popen(
                [*_launcher(name, directory), address, name, str(steps), *(["ddp"] if replicated else [])],
                env={**env, "PYTHONPATH": _python_path(), "CUDA_VISIBLE_DEVICES": ""},
                cwd=directory,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            deadline = time.monotonic() + _START_S
            while self._connection is None and self._process.poll() is None and time.monotonic() < deadline:
                with contextlib.suppress(TimeoutError):
                    self._connection = Connection(server.accept()[0].detach())
        if self._connection is None:
            said = Path(log.name).read_text(errors="replace").strip().splitlines()
            self.failure = f"did not start: {said[-1] if said else 'it said nothing'}"
            return
        version = self._receive(_START_S)
        if isinstance(version, str):
            self.version = version

    def measure(self, work: Callable[[Contestant], Round]) -> Round | None:
        """Measure one round; None once it has failed."""
        if self.failure or self._connection is None:
            return None
        self._connection.send(work)
        answer = self._receive(_ANSWER_S)
        return answer if isinstance(answer, Round) else None

    def close(self) -> None:
        """End the process and what it has started."""
        if self._connection is not None:
            self._connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _receive(self, seconds: float) -> object:
        assert self._connection is not None
        try:
            answer: object = self._connection.recv() if self._connection.poll(seconds) else TimeoutError()
        except (EOFError, ConnectionError) as error:
            answer = error
        if isinstance(answer, Exception):
            self.failure = str(answer) or type(answer).__name__
        return answer


def _launcher(name: str, directory: Path) -> list[str]:
    script = str(Path(__file__).with_name("worker.py"))
    if name == "TraceML":
        options = ["--logs-dir", str(directory / "traceml"), "--aggregator-port", str(free_port())]
        options += ["--no-save-training-output"]
        return [str(peers.VENV / "bin" / "traceml"), "run", *options, script, "--args"]
    return [str(peers.PYTHON) if CONTESTANTS[name].distribution else sys.executable, script]


def _python_path() -> str:
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


class Contest:
    """Contestants, side by side in processes of their own.

    Args:
        names: Who competes.
        rounds: Times that everybody attaches and detaches.
        work: Measures a round.
        steps: Steps per pass over the data.
        replicated: Whether in a rank of ``DistributedDataParallel``.

    Attributes:
        measured: Rounds by contestant.
        failures: Why some are missing.
        versions: What was measured, for the table's foot.
    """

    def __init__(
        self,
        names: Iterable[str],
        rounds: int,
        work: Callable[[Contestant], Round],
        steps: int,
        *,
        replicated: bool,
    ) -> None:
        self.measured: dict[str, list[Round]] = {name: [] for name in names}
        self.failures: dict[str, str] = {}
        self.versions: list[str] = []
        self._rounds = rounds
        self._work = work
        self._steps = steps
        self._replicated = replicated
        self._done = 0

    def look_for(self, *, may_install: bool) -> None:
        """Find the installed contestants, and install the others."""
        for name in self.measured:
            distribution = CONTESTANTS[name].distribution
            if distribution and peers.missing(distribution):
                reason = peers.install(distribution) if may_install else "not installed"
                if reason:
                    self.failures[name] = f"{distribution}: {reason}"

    def run(self) -> None:
        """Have everybody compete."""
        with contextlib.ExitStack() as stack:
            node = Node()
            stack.callback(node.close)
            node.start_daemon()
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tpd-")))
            for share in _shares(self._rounds):
                with contextlib.ExitStack() as ends:
                    self._race(share, ends, directory, node.env)
        _progress("")

    def _race(self, rounds: int, ends: contextlib.ExitStack, directory: Path, env: Mapping[str, str]) -> None:
        workers: dict[str, Worker] = {}
        for name in self.measured.keys() - self.failures.keys():
            workers[name] = Worker(name, self._steps, directory, env, replicated=self._replicated)
            ends.callback(workers[name].close)
        for _ in range(rounds):
            self._done += 1
            _progress(f"round {self._done} of {self._rounds}")
            for name, worker in workers.items():
                answer = worker.measure(self._work)
                if answer is not None:
                    self.measured[name].append(answer)
        self.failures |= {name: worker.failure for name, worker in workers.items() if worker.failure}
        self.versions = [workers[name].version for name in self.measured if name in workers]


def _shares(rounds: int) -> list[int]:
    """Return how many rounds each set of processes measures."""
    shares = [rounds // _PROCESSES + (number < rounds % _PROCESSES) for number in range(_PROCESSES)]
    return [share for share in shares if share]


def print_table(measured: Mapping[str, list[Round]], failures: Mapping[str, str]) -> None:
    """Print one row per contestant."""
    ours = _added_us(measured[OURS])
    print(
        f"{'':<26} {'added CPU per step':>18} {'p10':>7} {'p90':>7} {'x ours':>7} {'mean':>9} {'wall p50':>9}"
    )
    for name, rounds in measured.items():
        if name in failures or not rounds:
            print(f"{name:<26} not measured: {failures.get(name, 'no round')}")
            continue
        added = _added_us(rounds)
        deciles = statistics.quantiles((one.added_ns / 1e3 for one in rounds), n=10)
        mean = statistics.median(one.added_mean_ns for one in rounds) / 1e3
        ratio = f"{added / ours:.1f}" if ours > 0 and name != NOBODY else ""
        print(
            f"{name:<26} {added:>+15.1f} µs {deciles[0]:>+7.1f} {deciles[8]:>+7.1f} {ratio:>7} "
            f"{mean:>+6.0f} µs {_wall_change(rounds, 50):>+8.1%}"
        )


def judge(measured: Mapping[str, list[Round]], failures: Mapping[str, str]) -> list[str]:
    """Return the failed checks; print what cannot be judged."""
    if OURS in failures:
        return [f"torchperfd was not measured: {failures[OURS]}"]
    ours = _added_us(measured[OURS])
    complaints = []
    if ours > LIMIT_US:
        complaints.append(f"torchperfd adds {ours:.1f} µs to a step, limit {LIMIT_US:.0f} µs")
    for name, times in TIMES_CHEAPER.items():
        theirs = _added_us(measured[name])
        if name in failures:
            print(f"not judged: how much cheaper torchperfd is than {name}")
        elif theirs < times * ours:
            ratio = theirs / ours
            complaints.append(f"torchperfd is {ratio:.1f} times cheaper than {name}, wanted {times:g}")
    return complaints


def print_tail(measured: Mapping[str, list[Round]]) -> None:
    """Print by how much the 99th percentile changes, and how sure that is."""
    for name, rounds in measured.items():
        if len(rounds) > 1:
            error = _jackknife([_wall_change(rounds[:n] + rounds[n + 1 :], 99) for n in range(len(rounds))])
            low, median, high = statistics.quantiles((_wall_change([one], 99) for one in rounds), n=4)
            print(
                f"{name:<26} wall p99 {_wall_change(rounds, 99):>+7.2%}  standard error {error:.2%}"
                f"   by round: median {median:+.2%}, quartiles {low:+.2%} and {high:+.2%}"
            )


def judge_tail(measured: Mapping[str, list[Round]], failures: Mapping[str, str]) -> list[str]:
    """Return what is not as it should be."""
    if OURS in failures:
        return [f"the 99th percentile was not measured: {failures[OURS]}"]
    change = _wall_change(measured[OURS], 99)
    if change < LIMIT_P99:
        return []
    return [f"the 99th percentile of step times changes by {change:+.2%}, limit {LIMIT_P99:.0%}"]


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=30, help="times that everybody attaches and detaches")
    parser.add_argument("--alternations", type=int, default=8, help="off-on-on-off per round")
    parser.add_argument("--steps", type=int, default=20, help="steps per block; an alternation has four")
    parser.add_argument("--tail-rounds", type=int, default=6, help="rounds for the 99th percentile")
    parser.add_argument("--tail-only", action="store_true", help="measure the 99th percentile, nothing else")
    parser.add_argument(
        "--ddp", action="store_true", help="in a rank of DistributedDataParallel: collectives, too"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a smoke run: nothing installed, no limit judged"
    )
    options = parser.parse_args()
    complaints = []
    if not options.tail_only:
        rounds = 2 if options.quick else max(2, options.rounds)
        work = partial(measure, alternations=options.alternations)
        contest = Contest(CONTESTANTS, rounds, work, options.steps, replicated=options.ddp)
        contest.look_for(may_install=not options.quick)
        contest.run()
        print_table(contest.measured, contest.failures)
        _print_foot(contest, rounds, f"{options.alternations} x (off, on, on, off) x {options.steps} steps")
        if options.quick:
            return 1 if OURS in contest.failures else 0
        complaints += judge(contest.measured, contest.failures)
        print()
    work = partial(measure_tail, seconds=_TAIL_S)
    tail = Contest((NOBODY, OURS), max(2, options.tail_rounds), work, _TAIL_STEPS, replicated=options.ddp)
    tail.run()
    print_tail(tail.measured)
    print(
        f"a few steps off and on alternate, {max(2, options.tail_rounds)} rounds of {_TAIL_S:.0f} s; what"
        "\nour threads do every few seconds falls on steps that are on, once in as many as that time has."
    )
    complaints += judge_tail(tail.measured, tail.failures)
    for complaint in complaints:
        print(f"FAILED: {complaint}")
    return 1 if complaints else 0


def _print_foot(contest: Contest, rounds: int, turns: str) -> None:
    bare = statistics.median(one.off.quiet_ns for every in contest.measured.values() for one in every) / 1e3
    print(
        f"\nadded CPU: of the training thread, to an undisturbed step (bare: {bare:.0f} µs); median and"
        f"\ndeciles of {rounds} rounds of attach, {turns}, detach, in {len(_shares(rounds))}"
        "\nprocesses; mean: to any step."
        "\nSimpleProfiler: profile() around the same seven actions, without a Trainer, which times more;"
        "\ncallbacks: our own few lines in the manner of fastai and fastxtend."
    )
    versions = [version for version in contest.versions if version]
    print(", ".join([f"Python {platform.python_version()}", f"torch {torch.__version__}", *versions]))


def _jackknife(values: list[float]) -> float:
    """Return the standard error of an estimate, of its values with one round left out each."""
    return math.sqrt((len(values) - 1) * statistics.pvariance(values))


def _added_us(rounds: list[Round]) -> float:
    return statistics.median(one.added_ns for one in rounds) / 1e3 if rounds else 0.0


def _wall_change(rounds: list[Round], percentile: int) -> float:
    """Return by which part a percentile of the wall times of all steps is longer when on."""
    before, after = (
        statistics.quantiles(itertools.chain.from_iterable(steps), n=100)[percentile - 1]
        for steps in ((one.off.relative for one in rounds), (one.on.relative for one in rounds))
    )
    return after / before - 1


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{text:<40}\r{text}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
