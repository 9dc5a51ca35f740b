"""The child that analyses captures: it gets open files instead of names, and runs as the captures' user.

A trace is whatever its user made it. So the daemon opens the files, checks them, and passes their descriptors
on; the child works in a directory of its own, in which links lead to these descriptors. Where the daemon is
root, the child is the user whose captures these are, and has nothing of the daemon's environment.
"""

import contextlib
import os
import pwd
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from torchperfd_daemon.captures.catalog import Catalog
from torchperfd_daemon.captures.folder import may_act_for_users
from torchperfd_daemon.captures.low_priority import LINK, USER
from torchperfd_daemon.captures.manifest import FILE_NAME
from torchperfd_daemon.captures.retention import delete_tree
from torchperfd_daemon.errors import NoSuchTargetError, TorchperfdError

MAX_IDLE_S: Final = 50.0
"""A child that has waited for so long without using a CPU or a disk is ended."""
_LOOK_S: Final = 5.0
_MADE: Final = (0, 5)
"""Exit codes of commands that could read all traces, or some."""
_ERROR_BYTES: Final = 4096
_NOBODY: Final = 65_534
_ENVIRONMENT: Final = frozenset(
    {"PATH", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME"}
)
_BUSY: Final = frozenset("RD")
"""States in procfs: it runs or waits for a CPU, or waits for a disk."""


class StuckError(TorchperfdError):
    """The child has waited without doing anything."""


@dataclass(frozen=True, slots=True)
class ChildFiles:
    """What a child is given.

    Attributes:
        directory: Its working directory, with one folder for each capture.
        folders: Their names.
        links: Descriptors of the traces, by the path that is to lead to them.
        uid: The user that it runs as; None for this process's own.
    """

    directory: Path
    folders: tuple[str, ...]
    links: Mapping[str, int]
    uid: int | None

    def arguments(self) -> list[str]:
        """Return the arguments that have ``low_priority`` become the user and make the links."""
        user = [] if self.uid is None else [f"{USER}{self.uid}:{_group_of(self.uid)}"]
        return [*user, *(f"{LINK}{descriptor}:{path}" for path, descriptor in self.links.items())]

    def process_arguments(self) -> dict[str, Any]:
        """Return the arguments of ``Popen`` that make it such a child."""
        return {
            "cwd": self.directory,
            "env": {name: value for name, value in os.environ.items() if name in _ENVIRONMENT},
            "pass_fds": (*self.links.values(),),
            "start_new_session": True,
        }


@contextlib.contextmanager
def child_files(catalog: Catalog, captures: Sequence[str]) -> Iterator[ChildFiles]:
    """Open the traces of captures for a child, and prepare its directory; both are gone at the end.

    A child of a daemon that is root is the captures' user; of captures of two users it is root.

    Raises:
        NoSuchTargetError: There is no such capture, or it has no such trace.
        TorchperfdError: A trace is another user's.
        OSError: The directory cannot be made.
    """
    directory = Path(tempfile.mkdtemp(prefix="torchperfd-analysis-"))
    with contextlib.ExitStack() as opened:
        opened.callback(_delete, directory)
        links: dict[str, int] = {}
        owners = set()
        for capture_id in captures:
            found = catalog.found(capture_id)
            if found is None or found.record is None:
                raise NoSuchTargetError(f"no capture {capture_id} in {catalog.directory}")
            owners.add(found.owner)
            own = directory / capture_id
            own.mkdir(mode=0o700)
            (own / FILE_NAME).write_bytes(found.document)
            for trace in found.record.ranks:
                if trace.file:
                    file = opened.enter_context(catalog.open_own(capture_id, trace.file))
                    links[f"{capture_id}/{trace.file}"] = file.fileno()
        uid = owners.pop() if may_act_for_users() and len(owners) == 1 else 0
        if uid:
            # The directory last: until then its user can put nothing into it.
            for path in (*directory.glob(f"*/{FILE_NAME}"), *directory.glob("*"), directory):
                os.chown(path, uid, -1, follow_symlinks=False)
        yield ChildFiles(directory, tuple(captures), links, uid or None)


class AnalysisChild:
    """Runs one command at a time, which another thread may end.

    Args:
        timeout: Seconds that a command may take.
        max_idle: Seconds that it and its children may wait without doing anything.
    """

    def __init__(self, timeout: float, max_idle: float = MAX_IDLE_S) -> None:
        self._timeout = timeout
        self._max_idle = max_idle
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_stopped = False

    def stop(self) -> None:
        """End the command in progress, and run no other."""
        with self._lock:
            self._is_stopped = True
            if self._process is not None:
                _kill(self._process.pid)

    def run(self, command: Sequence[str], files: ChildFiles, output: IO[bytes] | int) -> None:
        """Run a command to its end, with its output in a file.

        Raises:
            TorchperfdError: It failed or took too long; the text is the last line of its errors.
            StuckError: It was idle for too long.
        """
        with tempfile.TemporaryFile() as errors:
            with self._lock:
                if self._is_stopped:
                    raise TorchperfdError("the daemon is stopping")
                process = self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=errors,
                    **files.process_arguments(),
                )
            try:
                code = self._wait(process)
            finally:
                with self._lock:
                    if process.poll() is None:
                        _kill(process.pid)
                    self._process = None
                process.wait()
            if code not in _MADE:
                raise TorchperfdError(_last_line(errors) or f"the analyser ended with {code}")

    def _wait(self, process: "subprocess.Popen[bytes]") -> int:
        watch = IdleWatch(process.pid, time.monotonic())
        deadline = time.monotonic() + self._timeout
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                left = deadline - time.monotonic()
                return process.wait(max(0.01, min(_LOOK_S, self._max_idle / 4, left)))
            now = time.monotonic()
            if now >= deadline:
                raise TorchperfdError(f"the analysis took more than {self._timeout:,.0f} s")
            if watch.idle_seconds(now) >= self._max_idle:
                raise StuckError(f"the analyser waited for {self._max_idle:,.0f} s without doing anything")


class IdleWatch:
    """Measures for how long a process and its children have used neither a CPU nor a disk.

    Args:
        now: Seconds on a clock that never steps back, as below.
    """

    def __init__(self, pid: int, now: float, proc: Path = Path("/proc")) -> None:
        self._pid = pid
        self._proc = proc
        self._used = -1
        self._since = now

    def idle_seconds(self, now: float) -> float:
        """Return for how many seconds it has been idle, as far as was seen."""
        used, is_busy = self._usage()
        if is_busy or used != self._used:
            self._used, self._since = used, now
        return now - self._since

    def _usage(self) -> tuple[int, bool]:
        """Return the CPU time of all its processes, in clock ticks, and whether one runs or reads a disk."""
        used, is_busy = 0, False
        pids = [self._pid]
        while pids:
            pid = pids.pop()
            for task in self._read(f"{pid}/task", is_directory=True).split():
                fields = self._read(f"{pid}/task/{task}/stat").rpartition(")")[2].split()
                if len(fields) > 12:
                    is_busy = is_busy or fields[0] in _BUSY
                    used += int(fields[11]) + int(fields[12])
                pids += map(int, self._read(f"{pid}/task/{task}/children").split())
        return used, is_busy

    def _read(self, name: str, *, is_directory: bool = False) -> str:
        """Return a file's text, or a directory's names; empty if the process has ended."""
        path = self._proc / name
        with contextlib.suppress(OSError):
            return " ".join(each.name for each in path.iterdir()) if is_directory else path.read_text()
        return ""


def _kill(pid: int) -> None:
    """Kill a child and the workers that it has started; those may outlive it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _last_line(errors: IO[bytes]) -> str:
    size = errors.seek(0, os.SEEK_END)
    errors.seek(max(0, size - _ERROR_BYTES))
    lines = errors.read().decode(errors="replace").strip().splitlines() or [""]
    return "".join(letter for letter in lines[-1] if letter.isprintable()).removeprefix("torchperfd: ")


def _delete(directory: Path) -> None:
    """Delete a directory that the child, and so its user, may have filled."""
    with contextlib.suppress(OSError):
        parent = os.open(directory.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            delete_tree(directory.name, parent)
        finally:
            os.close(parent)


def _group_of(uid: int) -> int:
    try:
        return pwd.getpwuid(uid).pw_gid
    except KeyError:
        return _NOBODY
