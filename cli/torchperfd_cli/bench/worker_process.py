"""The process that measures a script's code.

From outside it has a deadline, and an eye on memory. Inside it finds ``module:name`` or ``file.py:name``,
takes requests from a pipe, a JSON document a line, and answers. It is the leader of a process group, in which
the workers of a DataLoader are as well. When the requests end, because the process that asked is gone, it
ends the whole group.
"""

import contextlib
import importlib
import importlib.util
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any, Final

from torchperfd import errors
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
    """What is to be measured could not be made."""

    def __init__(self, problem: str, exit_code: int = 1) -> None:
        super().__init__(problem)
        self.exit_code = exit_code


class WorkerProcess:
    """A process that answers requests over two pipes, a JSON document a line.

    Args:
        module: Its ``main()`` runs in the process; see :mod:`torchperfd_cli.bench.worker_process`.
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


Answer = dict[str, Any]
_OURS: Final = (str(Path(__file__).parents[1]), str(Path(errors.__file__).parent))
_MAX_REASON: Final = 300


def serve(requests: int, answers: int, make: Callable[[], tuple[Answer, Callable[[Answer], Answer]]]) -> None:
    """Answer requests until they end.

    Args:
        make: Imports the script; returns the first answer, and what answers a request.
    """
    # What the script prints would otherwise be in the command's output.
    os.dup2(2, 1)
    queue: SimpleQueue[Answer] = SimpleQueue()
    threading.Thread(target=read_requests, args=(os.fdopen(requests), queue), daemon=True).start()
    with os.fdopen(answers, "w") as out:
        try:
            first, answer = make()
        except BaseException as error:  # noqa: BLE001 - the script's own, whatever it is
            send_answer(out, {"failed": explain(error), "exit_code": getattr(error, "exit_code", 1)})
            return
        send_answer(out, first)
        while True:
            try:
                reply = answer(queue.get())
            except Exception as error:  # noqa: BLE001 - the script's own
                reply = {"failed": explain(error)}
            send_answer(out, reply)


def explain(error: BaseException) -> str:
    """Return an exception in one line, with the last line of the script that it came through."""
    # What a worker raises comes as a text that ends with the exception's own.
    lines = [line for line in str(error).strip().splitlines() if line.strip()] or [""]
    if "Original Traceback" in str(error):
        return lines[-1].strip()[:_MAX_REASON]
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((*_OURS, "<")) and "site-packages" not in frame.filename
    ]
    where = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {lines[0][:_MAX_REASON]}{where}"


def send_answer(out: IO[str], answer: Answer) -> None:
    """Write an answer as a line."""
    out.write(json.dumps(answer) + "\n")
    out.flush()


def read_requests(requests: IO[str], queue: "SimpleQueue[Answer]") -> None:
    """Queue requests; once they end, since the process that asked is gone, end the whole group."""
    for line in requests:
        queue.put(json.loads(line))
    os.killpg(0, signal.SIGKILL)


class BadTargetError(TorchperfdError):
    """What was named does not exist, or is of another kind."""

    exit_code = 3


def find_target(target: str) -> Any:
    """Import a module, or a script as a module, and return one of its names.

    A script is not run as ``__main__``: what stands below ``if __name__ == "__main__"`` is left out.

    Raises:
        BadTargetError: There is no such module, file or name.
    """
    place, separator, name = target.rpartition(":")
    if not separator or not place or not name:
        raise BadTargetError(f"{target!r} names nothing", "write module:name or file.py:name")
    module = _import_script(Path(place)) if place.endswith(".py") else _import_module(place)
    found = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise BadTargetError(f"{place} has no {name}")
        found = getattr(found, part)
    return found


def _import_module(name: str) -> Any:
    # As `python -m` does.
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise BadTargetError(
                f"there is no module {name}", "write the path of a script: file.py:name"
            ) from error
        raise


def _import_script(path: Path) -> Any:
    if not path.is_file():
        raise BadTargetError(f"there is no file {path}")
    # Spawned workers import it under this name, from this directory.
    sys.path.insert(0, os.fspath(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    if spec is None or spec.loader is None:
        raise BadTargetError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
