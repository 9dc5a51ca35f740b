"""The processes that analyse ranks: each `rank_worker` answers one request after another.

A worker forks a child for each, so that only the first rank pays for starting Python and for importing.
"""

import contextlib
import os
import pickle
import subprocess
from types import TracebackType
from typing import Final

from torchperfd.model.own_commands import own_command

# OpenBLAS and its like would start threads, which do not survive a fork; nothing here uses them.
_ONE_THREAD: Final = dict.fromkeys(("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"), "1")


class RankProcesses:
    """As many workers as threads ask at once; leaving its context ends them."""

    def __init__(self) -> None:
        self._idle: list[_Worker] = []

    def __enter__(self) -> "RankProcesses":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._idle:
            worker.close()

    def ask(self, request: object) -> tuple[int, bytes]:
        """Return the exit code of a child, negative if it was killed, and what it wrote."""
        worker = self._idle.pop() if self._idle else _Worker()
        try:
            return worker.ask(request)
        finally:
            if worker.is_ready:
                self._idle.append(worker)
            else:
                worker.close()


class _Worker:
    """A process that answers requests.

    Attributes:
        is_ready: It has answered, and waits for the next one.
    """

    def __init__(self) -> None:
        # A new interpreter: a fork would inherit the locks of whatever threads the caller runs. And not one
        # that multiprocessing spawns, which imports modules from the current directory.
        reading, writing = os.pipe()
        self._answers = os.fdopen(reading, "rb")
        self.is_ready = False
        try:
            self._process = subprocess.Popen(
                own_command("torchperfd_daemon.analysis.rank_worker", str(writing)),
                stdin=subprocess.PIPE,
                pass_fds=(writing,),
                env=os.environ | _ONE_THREAD,
            )
        except BaseException:
            self._answers.close()
            raise
        finally:
            os.close(writing)

    def ask(self, request: object) -> tuple[int, bytes]:
        """Return the answer; the process's own exit code if that has ended."""
        requests = self._process.stdin
        assert requests is not None
        self.is_ready = False
        try:
            requests.write(pickle.dumps(request))
            requests.flush()
            code, found = pickle.load(self._answers)
        except (BrokenPipeError, EOFError, pickle.UnpicklingError):
            return self._process.wait() or 1, b""
        self.is_ready = True
        return code, found

    def close(self) -> None:
        """End the process and wait for it."""
        with self._answers, self._process:
            assert self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
