"""The process that measures a script's code, from outside: with a deadline, and with an eye on memory.

What is measured may deadlock, may never end and may take all memory. Then its process is killed, with the
workers that it has started.
"""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from torchperfd.errors import TorchperfdError
from torchperfd.model.formatting import duration, size
from torchperfd.model.own_commands import script_command

_POLL_S: Final = 0.2
_MIN_FREE: Final = 0.05
_READ_BYTES: Final = 1 << 16
_MEMINFO: Final = Path("/proc/meminfo")
_GROUP: Final = Path("/sys/fs/cgroup")

FreeMemory = Callable[[], tuple[int, int]]
"""Returns the free bytes and all bytes that there are."""


class WorkerFailedError(Exception):
    """The process gave no answer and is gone; the message has the reason."""


class FactoryError(TorchperfdError):
    """What is to be measured could not be made.

    Args:
        problem: What went wrong.
        exit_code: Of the command.
    """

    def __init__(self, problem: str, exit_code: int = 1) -> None:
        super().__init__(problem)
        self.exit_code = exit_code


class WorkerProcess:
    """A process that answers requests over two pipes, a JSON document a line.

    Args:
        module: Its ``main()`` runs in the process; see :mod:`torchperfd.bench.worker_pipe`.
        arguments: Of the module, ahead of the two descriptors.
        free_memory: That of this machine when None.
        environment: Of the process; this process's own when None.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        free_memory: FreeMemory | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._free_memory = free_memory or free_and_total_memory
        self._unread = b""
        requests, self._requests = os.pipe()
        self._answers, answers = os.pipe()
        try:
            self._process = subprocess.Popen(
                script_command(module, *arguments, str(requests), str(answers)),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(requests, answers),
                start_new_session=True,
                env=environment,
            )
        finally:
            os.close(requests)
            os.close(answers)

    def start(self, timeout: float, problem: str) -> dict[str, Any]:
        """Wait until the script is imported; return the first answer.

        Args:
            timeout: Seconds to wait.
            problem: What it means where that fails, for the error.

        Raises:
            FactoryError: The script raised, or did not end in time; the process has been killed.
        """
        try:
            answer = self.ask(None, timeout)
        except WorkerFailedError as error:
            raise FactoryError(f"{problem}: {error}") from error
        if "failed" in answer:
            self.close()
            raise FactoryError(f"{problem}: {answer['failed']}", int(answer["exit_code"]))
        return answer

    def ask(self, request: dict[str, Any] | None, timeout: float) -> dict[str, Any]:
        """Send a request, if there is one, and wait for an answer.

        Raises:
            WorkerFailedError: None came; the process and what it had started have been killed.
        """
        try:
            if request is not None:
                with contextlib.suppress(BrokenPipeError):  # it has ended: the answer is missing then
                    os.write(self._requests, (json.dumps(request) + "\n").encode())
            return self._wait(timeout)
        except WorkerFailedError:
            self.close()
            raise

    def close(self) -> None:
        """End the process and what it has started."""
        for descriptor in (self._requests, self._answers):
            if descriptor >= 0:
                os.close(descriptor)
        self._requests = self._answers = -1
        # The group outlives its leader where that has ended and a worker has not.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _wait(self, timeout: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            selector.register(self._answers, selectors.EVENT_READ)
            while time.monotonic() < deadline:
                if selector.select(_POLL_S):
                    data = os.read(self._answers, _READ_BYTES)
                    if not data:
                        raise WorkerFailedError("its process ended without an answer")
                    self._unread += data
                    line, newline, rest = self._unread.partition(b"\n")
                    if newline:
                        self._unread = rest
                        answer: dict[str, Any] = json.loads(line)
                        return answer
                free, total = self._free_memory()
                if free < _MIN_FREE * total:
                    raise WorkerFailedError(
                        f"stopped before memory ran out: {size(free)} of {size(total)} were free"
                    )
        raise WorkerFailedError(f"no answer within {duration(timeout)}")


def free_and_total_memory(meminfo: Path = _MEMINFO, group: Path = _GROUP) -> tuple[int, int]:
    """Return the bytes that are free and all there are, of the machine or of this control group."""
    figures = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    free, total = (int(figures[name].split()[0]) << 10 for name in ("MemAvailable", "MemTotal"))
    with contextlib.suppress(OSError, ValueError, KeyError):  # "max" is no number
        limit = int((group / "memory.max").read_text())
        if limit < total:
            used = int((group / "memory.current").read_text())
            kept = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            # Files that were read and are not in use are given up when memory is needed.
            return min(free, limit - used + int(kept["inactive_file"])), limit
    return free, total
