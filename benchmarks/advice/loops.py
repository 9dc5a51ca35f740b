"""A training loop in another process, which runs steps on request."""

import ctypes.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Protocol, Self

from benchmarks.advice import scripts

from torchperfd_daemon import analysis
from torchperfd_daemon.worker_cost import of_this_machine

# Memory that is touched for the first time is had page by page: more of a step than some advice saves. With
# glibc that comes and goes, by what was freed before, most of all while a step is recorded, since what the
# profiler keeps leaves the heap in pieces. jemalloc keeps the small from the large, and here all that it has.
_JEMALLOC: Final = ctypes.util.find_library("jemalloc")
ENVIRONMENT: Final[dict[str, str]] = (
    {"LD_PRELOAD": _JEMALLOC, "MALLOC_CONF": "dirty_decay_ms:-1,muzzy_decay_ms:-1,oversize_threshold:0"}
    if _JEMALLOC
    else {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
)
ALLOCATOR: Final = "jemalloc" if _JEMALLOC else "glibc, which is unsteady here: install libjemalloc2"
"""What gives the loops their memory."""


class Worker(Protocol):
    stdin: IO[str] | None
    stdout: IO[str] | None

    def wait(self) -> int:
        """Wait for its end."""


Start = Callable[[Sequence[str]], Worker]
"""Starts a worker with these arguments."""


def start_process(arguments: Sequence[str]) -> Worker:
    """Start a worker as a process of its own, which imports torch."""
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.advice.worker", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | ENVIRONMENT,
        text=True,
    )


@dataclass(frozen=True, slots=True)
class Recording:
    """Some steps as the profiler saw them.

    Attributes:
        step_ns: The first rank's mean step, with what recording cost.
        advice: The advice, most time saved first.
    """

    step_ns: float
    advice: Sequence[analysis.Advice]


class Loop:
    """The processes of one loop. A context manager: they end with it.

    Args:
        name: Which loop, a key of ``scripts.SCRIPTS``, ``scripts.WELL_TUNED`` or ``controls.CONTROLS``.
        variant: ``slow`` or ``tuned``; of a control, the change in JSON.
        start: How each process is started.

    Raises:
        RuntimeError: A process ended early.
    """

    def __init__(self, name: str, variant: str, start: Start = start_process) -> None:
        count = scripts.SCRIPTS[name].processes if name in scripts.SCRIPTS else 1
        self._name = f"{name} ({variant})"
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        self._processes = [
            start([name, variant, *([str(rank), str(count), store] if count > 1 else [])])
            for rank in range(count)
        ]
        self._is_ready = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for process in self._processes:
            if process.stdin:
                process.stdin.close()
        for process in self._processes:
            process.wait()
            if process.stdout:
                process.stdout.close()
        self._folder.cleanup()

    def wait(self) -> None:
        """Wait until they are ready; else the first request does."""
        if not self._is_ready:
            self._is_ready = True
            for process in self._processes:
                self._answer(process)

    def steps(self, count: int) -> list[int]:
        """Run steps; return the first rank's times in ns."""
        times: list[int] = self._ask([f"steps {count}"] * len(self._processes))[0]
        return times

    def record(self) -> Recording:
        """Record some steps; return the analyser's advice on them."""
        folder = Path(self._folder.name)
        files = [folder / f"rank{rank}.json" for rank in range(len(self._processes))]
        times = self._ask([f"capture {file}" for file in files])[0]
        advice = analysis.gather(
            [
                (rank, analysis.summarise(analysis.load(file), worker_cost=of_this_machine).advice)
                for rank, file in enumerate(files)
            ]
        )
        return Recording(statistics.fmean(times), advice)

    def _ask(self, commands: Sequence[str]) -> list[Any]:
        self.wait()
        for process, command in zip(self._processes, commands, strict=True):
            assert process.stdin
            process.stdin.write(f"{command}\n")
            process.stdin.flush()
        return [self._answer(process) for process in self._processes]

    def _answer(self, process: Worker) -> Any:
        assert process.stdout
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"a process of {self._name} ended early")
        return json.loads(line)
