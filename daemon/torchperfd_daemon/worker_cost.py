"""The cost of moving a batch from a DataLoader worker on this machine: measured once, then kept in a file.

torch hands a tensor over as the descriptor of shared memory, by Python's own multiprocessing. A batch of
plain shared memory takes the same way, and the same time, without torch.
"""

import contextlib
import fcntl
import functools
import json
import math
import mmap
import multiprocessing
import os
import platform
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any, Final

from torchperfd.model.loader_facts import UNMEASURED_COST, WorkerCost
from torchperfd.model.own_commands import own_command

_ROUNDS: Final = 4
_BATCHES: Final = 25
_LARGE_BYTES: Final = 1 << 20
_SMALL_BYTES: Final = 4096
_TENSORS: Final = 5
# What the training thread does between draws, so that a worker has the next batch ready.
_BETWEEN_S: Final = 0.002
_TIMEOUT_S: Final = 20.0
_MAX_FILE_BYTES: Final = 4096
# Beyond these a figure is a disturbance, and no machine.
_MAX_S: Final = 0.1
# On a busier machine the measuring process waited for a CPU for more than this share of the time.
_LOADED: Final = 0.05
# Below these nothing else wants the CPUs: of the time in which any task waits for one, else the load per CPU.
_QUIET_PERCENT: Final = 5.0
_QUIET_LOAD: Final = 0.5
_PRESSURE: Final = Path("/proc/pressure/cpu")
_MACHINE_ID: Final = Path("/etc/machine-id")
_CPUINFO: Final = Path("/proc/cpuinfo")


class MachineCost:
    """The cost on this machine for a process that may not wait: measured in the background if need be.

    Args:
        path: Where it is kept; that of the user's cache when None.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._cost: WorkerCost | None = None
        self._thread: threading.Thread | None = None

    def get(self) -> WorkerCost:
        """Return the cost, at once: until it has been measured that of an unmeasured machine."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._find, name="torchperfd-worker-cost", daemon=True)
            self._thread.start()
        return self._cost or UNMEASURED_COST

    def _find(self) -> None:
        self._cost = of_this_machine(self._path)


THIS_MACHINE: Final = MachineCost()
"""That of the daemon."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """A measurement: whether the machine was busy then, and the cost."""

    loaded: bool
    cost: WorkerCost


def of_this_machine(path: Path | None = None) -> WorkerCost:
    """Return the cost on this machine, measured if it never was.

    What was measured while the machine was busy is measured again, but only once it is quiet. So advice does
    not change with the load. A process of low priority does not measure, because the result would reflect the
    priority.

    Args:
        path: Where it is kept; that of the user's cache when None.
    """
    path = path or cache_path()
    kept = _read(path)
    if _is_due(kept) and os.getpriority(os.PRIO_PROCESS, 0) <= 0:
        with _alone(path):
            kept = _read(path)
            if _is_due(kept) and (measured := measure_in_process()) is not None:
                cost, loaded = measured
                if kept is None or not loaded:
                    kept = _Kept(loaded, cost)
                    _write(path, kept)
    return kept.cost if kept is not None else UNMEASURED_COST


def _is_due(kept: _Kept | None) -> bool:
    return kept is None or (kept.loaded and is_quiet())


def is_quiet() -> bool:
    """Return whether hardly anything on this machine waits for a CPU now; False where that is unknown."""
    try:
        words = _PRESSURE.read_text().split()
        return float(words[1].removeprefix("avg10=")) < _QUIET_PERCENT
    except (OSError, ValueError, IndexError):
        return os.getloadavg()[0] < _QUIET_LOAD * (os.cpu_count() or 1)


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Have one process of the user measure at a time, where the directory can be written to."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path.with_suffix(".lock"), flags, 0o600)
    except OSError:
        yield
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def cache_path() -> Path:
    """Return where the cost is kept, of this machine."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (
        (Path(base) if base.startswith("/") else Path("~/.cache").expanduser())
        / "torchperfd"
        / "worker-cost.json"
    )


def _read(path: Path) -> _Kept | None:
    """Return what a file has, None where it has no cost of this machine, or for another reason."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            found = json.loads(file.read(_MAX_FILE_BYTES))
        return _Kept(bool(found["loaded"]), _parsed(found["cost"])) if found["machine"] == machine() else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(path: Path, kept: _Kept) -> None:
    """Keep the cost in a file; where that cannot be written it is measured again next time."""
    text = json.dumps({"machine": machine(), "loaded": kept.loaded, "cost": asdict(kept.cost)})
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    with contextlib.suppress(OSError):
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(fresh, flags, 0o600), "w") as file:
            file.write(text)
        fresh.replace(path)


def measure_in_process() -> tuple[WorkerCost, bool] | None:
    """Measure in a separate process, which may fork because it has no other threads; None if that fails.

    Also returns whether the machine was too busy for the result to be kept for long.
    """
    try:
        process = subprocess.Popen(
            own_command("torchperfd_daemon.worker_cost"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        with process:
            try:
                found = json.loads(process.communicate(timeout=_TIMEOUT_S)[0])
                return _parsed(found["cost"]), bool(found["loaded"])
            finally:
                # Its worker, too, which would wait for the next request forever.
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError):
        return None


def _measure() -> WorkerCost:
    """Measure: hand over small batches of one tensor and of several, and large ones, in a second or two."""
    kinds = ((1, _SMALL_BYTES), (_TENSORS, _SMALL_BYTES), (1, _LARGE_BYTES))
    # Each kind in every round, because other load on the machine changes over time.
    rounds = [[_handed_over(*kind) for kind in kinds] for _ in range(_ROUNDS)]
    least = [[min(column) for column in zip(*figures, strict=True)] for figures in zip(*rounds, strict=True)]
    parts: list[float] = []
    for small, many, big in zip(*least, strict=True):
        each = max(0.0, many - small) / (_TENSORS - 1)
        parts += [max(0.0, small - each), each, max(0.0, big - small) / (_LARGE_BYTES - _SMALL_BYTES)]
    return WorkerCost(*parts)


def _measured() -> dict[str, Any]:
    """Measure; return the result as a document."""
    began, queued = time.monotonic(), _queued_s()
    cost = _measure()
    share = (_queued_s() - queued) / (time.monotonic() - began)
    return {"cost": asdict(cost), "loaded": share > _LOADED}


def _queued_s() -> float:
    """Return how long this thread has been ready to run without a CPU; 0 where that is unknown."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def _handed_over(tensors: int, size: int) -> tuple[float, float]:
    """Return the training thread's wall time and the worker's CPU time for each batch; seconds."""
    context = multiprocessing.get_context("fork")
    asked: multiprocessing.Queue[Any] = context.Queue()
    made: multiprocessing.Queue[Any] = context.Queue()
    worker = context.Process(target=_work, args=(asked, made, tensors, size), daemon=True)
    worker.start()
    indices = list(range(32))
    # Two batches ahead, as a DataLoader is.
    for _ in range(2):
        asked.put(indices)
    took = []
    for _ in range(_BATCHES):
        began = time.perf_counter()
        made.get()
        asked.put(indices)
        ended = time.perf_counter()
        took.append(ended - began)
        while time.perf_counter() < ended + _BETWEEN_S:
            pass
    # The last two are taken as well: they are shared by a thread of the worker.
    for _ in range(2):
        made.get()
    asked.put(None)
    spent = made.get()
    worker.join()
    for queue in (asked, made):
        queue.close()
        queue.join_thread()
    # Other work on the machine only adds to it, and adds to most of them where there is much.
    return statistics.quantiles(took, n=4)[0], spent / (_BATCHES + 2)


def _work(asked: Any, made: Any, tensors: int, size: int) -> None:
    """Make batches of shared memory until the requests end; then send the CPU time used."""
    began = time.process_time()
    while asked.get(timeout=_TIMEOUT_S) is not None:
        made.put([_Shared(size) for _ in range(tensors)])
    made.put(time.process_time() - began)


class _Shared:
    """Shared memory with something in it, which is pickled as torch pickles a tensor: as a descriptor."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._descriptor = os.memfd_create("batch", os.MFD_CLOEXEC)
        os.ftruncate(self._descriptor, size)
        with mmap.mmap(self._descriptor, size) as memory:
            memory.write(bytes(size))

    def __reduce__(self) -> tuple[Any, ...]:
        return _mapped, (DupFd(self._descriptor), self._size)

    def __del__(self) -> None:
        os.close(self._descriptor)


def _mapped(shared: Any, size: int) -> None:
    """Map what was handed over, and read it as a training step does."""
    descriptor = shared.detach()
    with mmap.mmap(descriptor, size) as memory:
        memory.read()
    os.close(descriptor)


def _parsed(found: dict[str, float]) -> WorkerCost:
    """Return the cost that a document has.

    Raises:
        ValueError: A figure is none that a machine can have.
    """
    parts = {each.name: float(found[each.name]) for each in fields(WorkerCost)}
    if not all(math.isfinite(part) and 0 <= part <= _MAX_S for part in parts.values()):
        raise ValueError("no cost of a machine")
    return WorkerCost(**parts)


@functools.cache
def machine() -> str:
    """Return what distinguishes this machine from others: its id or its name, its processor, and its CPUs."""
    identity = _first_line(_MACHINE_ID) or socket.gethostname()
    return f"{identity} {_model()} {os.cpu_count()}"


def _model() -> str:
    try:
        lines = _CPUINFO.read_text().splitlines()
    except OSError:
        return platform.machine()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def _first_line(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_measured()))
