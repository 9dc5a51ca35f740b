"""The contest: every contestant in a process of its own, measured round by round."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

from benchmarks.overhead import peers
from benchmarks.overhead.contestants import CONTESTANTS, Contestant
from benchmarks.overhead.worker import Round
from tests.support.node import ROOT, Node, free_port

OURS: Final = "torchperfd"
NO_PROFILER: Final = "nothing (A/A)"
_PROCESSES: Final = 3  # Where the memory of a process happens to lie is worth a microsecond or two.
_START_S: Final = 120.0
_ANSWER_S: Final = 300.0


class Worker:
    """A contestant's process and the line to it."""

    def __init__(
        self,
        name: str,
        directory: Path,
        env: Mapping[str, str],
        *,
        steps: int,
        replicated: bool,
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
                [*_launcher(name, directory), address, name, str(steps), *_mode(replicated)],
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


def _mode(replicated: bool) -> list[str]:
    return ["ddp"] if replicated else []


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
        *,
        steps: int,
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
        for name in self.measured:
            distribution = CONTESTANTS[name].distribution
            if distribution and peers.missing(distribution):
                reason = peers.install(distribution) if may_install else "not installed"
                if reason:
                    self.failures[name] = f"{distribution}: {reason}"

    def run(self) -> None:
        with contextlib.ExitStack() as stack:
            node = Node()
            stack.callback(node.close)
            node.start_daemon()
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tpd-")))
            for share in shares(self._rounds):
                with contextlib.ExitStack() as ends:
                    self._race(share, ends, directory, node.env)
        _progress("")

    def _race(self, rounds: int, ends: contextlib.ExitStack, directory: Path, env: Mapping[str, str]) -> None:
        workers: dict[str, Worker] = {}
        for name in self.measured.keys() - self.failures.keys():
            workers[name] = Worker(name, directory, env, steps=self._steps, replicated=self._replicated)
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


def shares(rounds: int) -> list[int]:
    """Return how many rounds each set of processes measures."""
    shares = [rounds // _PROCESSES + (number < rounds % _PROCESSES) for number in range(_PROCESSES)]
    return [share for share in shares if share]


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{text:<40}\r{text}", end="", file=sys.stderr, flush=True)
