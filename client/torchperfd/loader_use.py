"""How a training process uses its DataLoader: what advice on worker processes depends on.

A draw is sampled after each flush, about once a second, and costs the training thread some 50 µs.
"""

import contextlib
import os
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torchperfd.interrupts import is_from_script

_REMEMBERED: Final = 32
"""Samples that the means are over."""
_LEAST_WORKER_BATCHES: Final = 4
_SCHEDSTAT: Final = "/proc/thread-self/schedstat"


@dataclass(frozen=True, slots=True)
class LoaderUse:
    """The loader that the newest sampled draw was from, and means of the latest samples; None where unknown.

    Attributes:
        workers: Its worker processes.
        cpus: CPUs that the process may use: affinity, control group's quota, and its share of the node's.
        draw_cpu: The share of a draw in this process that is CPU time, 0 to 1; without the time in which
            the thread was ready to run and had no CPU.
        rest_cpus: CPUs that the process uses on average between draws.
        batch_tensors: Tensors in a batch.
        batch_bytes: Their bytes.
        batch_size: Samples that the loader puts into a batch; 0 where it does not choose them itself.
        receive_seconds: What a draw takes when the workers have a batch ready.
        worker_cpu_seconds: CPU time of the workers' main threads for each batch.
        worker_queued: The share of the workers' time in which they were ready to run without a CPU.
        indexable: The dataset is a plain ``TensorDataset``, collated and sampled in torch's usual ways.
        shuffles: Its sampler is torch's ``RandomSampler``.
        batches_per_step: Draws in a training step; 0 before the first.
        queued: The share of the time in which the training thread was ready to run that it had no CPU.
    """

    workers: int = 0
    cpus: float = 0.0
    draw_cpu: float | None = None
    rest_cpus: float | None = None
    batch_tensors: int = 0
    batch_bytes: int = 0
    batch_size: int = 0
    receive_seconds: float | None = None
    worker_cpu_seconds: float | None = None
    worker_queued: float | None = None
    indexable: bool = False
    shuffles: bool = False
    batches_per_step: float = 0.0
    queued: float | None = None


class LoaderSampler:
    """Takes the samples. Its methods are the training thread's, except for those that say otherwise."""

    def __init__(self) -> None:
        self._due = False
        self._watch: Callable[[], None] | None = None
        self._is_training: Callable[[], bool] = lambda: True
        self._describe: Callable[[Any], tuple[int, bool, bool]] = lambda _: (0, False, False)
        self._tensor: Any = None
        self._iterator: Callable[[], Any] = lambda: None
        self._workers = 0
        self._cpus = 0.0
        self._about: tuple[int, bool, bool] = (0, False, False)
        self._batch: tuple[int, int] = (0, 0)
        # Of draws in this process: wall time less what was spent in line for a CPU, and CPU time; ns.
        self._draws: deque[tuple[int, int]] = deque(maxlen=_REMEMBERED)
        # Between draws: wall time, and CPU time of the whole process; ns.
        self._rests: deque[tuple[int, int]] = deque(maxlen=_REMEMBERED)
        # From a sampled draw to the next draw, of this thread: time in line for a CPU, and CPU time; ns.
        self._lines: deque[tuple[int, int]] = deque(maxlen=_REMEMBERED)
        # Of draws that found a batch ready: wall time; ns.
        self._received: deque[int] = deque(maxlen=_REMEMBERED)
        # Of the workers, all together: batches, CPU time, time in line for a CPU, their time; ns.
        self._made: deque[tuple[int, int, int, int]] = deque(maxlen=_REMEMBERED)
        self._last: tuple[Any, int, int, int, int] | None = None
        self._ended: tuple[int, int, int, int] | None = None

    def install(
        self,
        watch: Callable[[], None],
        is_training: Callable[[], bool],
        describe: Callable[[Any], tuple[int, bool, bool]],
        tensor: type,
    ) -> None:
        """Begin.

        Args:
            watch: Has the next draw come to :meth:`at_draw`, called on any thread.
            is_training: Whether a draw that begins now is for training.
            describe: Returns an iterator's batch size, whether its dataset is indexable, and whether it
                is shuffled.
            tensor: The class of plain tensors.
        """
        self._watch, self._is_training, self._describe, self._tensor = watch, is_training, describe, tensor
        self._due = True

    def arm(self) -> None:
        """Have the next draw sampled; called on the flushing thread."""
        if self._watch is not None:
            self._due = True
            self._watch()

    def at_draw(self, iterator: Any, ready: int) -> bool:
        """Take what a draw that begins may show; return whether the draw after it has to come here as well.

        Args:
            iterator: Whose.
            ready: Batches that its workers have ready; -1 without workers.
        """
        if self._ended is not None:
            wall, cpu, queued, own = self._ended
            self._ended = None
            self._lines.append((_queued_ns() - queued, time.thread_time_ns() - own))
            self._rests.append((time.perf_counter_ns() - wall, time.process_time_ns() - cpu))
        # The first draw of an iterator starts its workers and shuffles.
        if not self._due or not iterator._num_yielded or not self._is_training():
            return self._due
        self._due = False
        if self._iterator() is not iterator:
            if iterator._num_workers != self._workers:
                self._draws.clear()
                self._rests.clear()
                self._received.clear()
                self._made.clear()
            self._iterator, self._workers = weakref.ref(iterator), iterator._num_workers
            self._about = self._describe(iterator)
        iterator._next_data = TimedDraw(self, iterator, ready)
        return True

    def sampled(
        self, batch: Any, ready: int, wall_ns: int, cpu_ns: int, queued_ns: int, before: tuple[int, int]
    ) -> None:
        """Take a sampled draw: what it gave, what it took, and the thread's counters before it.

        Args:
            batch: What was drawn.
            ready: Batches that the workers had ready; -1 without workers.
            wall_ns: What it took.
            cpu_ns: What of that was CPU time.
            queued_ns: What of it was spent in line for a CPU.
            before: The thread's time in line for a CPU and its CPU time when the draw began, ns.
        """
        if ready < 0:
            self._draws.append((max(wall_ns - queued_ns, 1), cpu_ns))
        elif ready > 0:
            self._received.append(wall_ns)
        self._batch = self._size(batch)
        self._ended = (time.perf_counter_ns(), time.process_time_ns(), *before)

    def _size(self, batch: Any) -> tuple[int, int]:
        """Return how many tensors a batch holds, and of how many bytes; of plain ones in plain containers."""
        tensors = size = 0
        parts = [batch]
        for _ in range(256):
            if not parts:
                break
            part = parts.pop()
            if self._tensor is not None and type(part) is self._tensor:
                tensors += 1
                size += part.nbytes
            elif type(part) in (list, tuple):
                parts += part[:64]
            elif type(part) is dict:
                parts += list(part.values())[:64]
        return tensors, size

    def use(self, batches_per_step: float) -> LoaderUse | None:
        """Return what is known by now, None before the first sample; called on the flushing thread."""
        iterator = self._iterator()
        if iterator is not None and self._workers:
            self._follow_workers(iterator)
        if self._batch == (0, 0) and not self._draws and not self._received:
            return None
        self._cpus = self._cpus or available_cpus()
        batches, cpu, queued, spent = (
            (sum(column) for column in zip(*list(self._made), strict=True)) if (self._made) else (0, 0, 0, 0)
        )
        return LoaderUse(
            workers=self._workers,
            cpus=self._cpus,
            draw_cpu=_ratio([(cpu, wall) for wall, cpu in list(self._draws)]),
            rest_cpus=_ratio([(cpu, wall) for wall, cpu in list(self._rests)]),
            batch_tensors=self._batch[0],
            batch_bytes=self._batch[1],
            batch_size=self._about[0],
            receive_seconds=sum(received) / len(received) / 1e9
            if (received := list(self._received))
            else None,
            worker_cpu_seconds=cpu / batches / 1e9 if batches >= _LEAST_WORKER_BATCHES else None,
            worker_queued=min(1.0, queued / spent) if spent else None,
            indexable=self._about[1],
            shuffles=self._about[2],
            batches_per_step=batches_per_step,
            queued=_ratio([(queued, queued + own) for queued, own in list(self._lines)]),
        )

    def _follow_workers(self, iterator: Any) -> None:
        """Add what the workers have done since the last time, by the kernel's account of them."""
        try:
            spent = [_schedstat(f"/proc/{worker.pid}/schedstat") for worker in iterator._workers]
            received = iterator._rcvd_idx
        except (AttributeError, OSError, ValueError, IndexError):
            self._last = None
            return
        now = time.monotonic_ns()
        cpu, queued = (sum(column) for column in zip(*spent, strict=True))
        last, self._last = self._last, (self._iterator, received, cpu, queued, now)
        if last is None or last[0] is not self._iterator or received <= last[1]:
            return
        self._made.append((received - last[1], cpu - last[2], queued - last[3], (now - last[4]) * len(spent)))


class TimedDraw:
    """Stands for an iterator's own way to its next batch, once, and measures it.

    Args:
        sampler: Who wants to know.
        iterator: Whose next batch it is.
        ready: Batches that its workers have ready; -1 without workers.
    """

    def __init__(self, sampler: LoaderSampler, iterator: Any, ready: int) -> None:
        self._sampler = sampler
        self._iterator = iterator
        self._ready = ready
        self._original = iterator._next_data

    def __call__(self) -> Any:
        """Return the next batch."""
        vars(self._iterator).pop("_next_data", None)
        queued = _queued_ns()
        wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
        batch = self._original()
        before = queued, cpu
        wall, cpu = time.perf_counter_ns() - wall, time.thread_time_ns() - cpu
        try:
            self._sampler.sampled(batch, self._ready, wall, cpu, _queued_ns() - queued, before)
        except Exception as error:  # of a batch that is out of the ordinary, for example
            if is_from_script(error):
                raise
        return batch


def available_cpus(root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc/self/cgroup")) -> float:
    """Return how many CPUs this process may use: by affinity, by quota, and beside the node's other ranks."""
    try:
        bound = len(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        bound = os.cpu_count() or 1
    quota = _quota(root, proc)
    cpus = float(bound) if quota is None else min(float(bound), quota)
    # Ranks that are each bound to CPUs of their own share none.
    if cpus < bound or bound == os.cpu_count():
        with contextlib.suppress(ValueError):
            cpus /= max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return cpus


def _quota(root: Path, proc: Path) -> float | None:
    """Return the least quota of this process's control group and of those around it; None without one."""
    try:
        groups = [line.split(":", 2) for line in proc.read_text().splitlines()]
    except OSError:
        return None
    found = []
    for _, controllers, path in (each for each in groups if len(each) == 3):
        if not controllers:
            top = root
        elif "cpu" in controllers.split(","):
            top = root / "cpu"
        else:
            continue
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            found.append(_quota_of(folder))
            if folder == top:
                break
    return min((each for each in found if each), default=None)


def _quota_of(folder: Path) -> float | None:
    try:
        if (folder / "cpu.max").exists():
            most, period = (folder / "cpu.max").read_text().split()
        else:
            most = (folder / "cpu.cfs_quota_us").read_text()
            period = (folder / "cpu.cfs_period_us").read_text()
        return int(most) / int(period) if int(most) > 0 and int(period) > 0 else None
    except (OSError, ValueError):
        return None  # "max" is no number


def _ratio(pairs: list[tuple[int, int]]) -> float | None:
    whole = sum(below for _, below in pairs)
    return sum(above for above, _ in pairs) / whole if whole else None


def _queued_ns() -> int:
    """Return how long this thread has been ready to run without a CPU; 0 where the kernel does not say."""
    try:
        with open(_SCHEDSTAT, "rb") as file:  # noqa: PTH123 - on the training thread, and pathlib is slow
            fields = file.read(128).split()
    except OSError as error:
        if error.filename != _SCHEDSTAT:
            raise  # a signal handler's, such as a timeout
        return 0
    return int(fields[1]) if len(fields) > 1 else 0


def _schedstat(path: str) -> tuple[int, int]:
    """Return CPU time and time in line for a CPU; ns.

    Raises:
        OSError: The kernel has no such file, or the thread is gone.
    """
    fields = Path(path).read_bytes().split()
    return int(fields[0]), int(fields[1])
