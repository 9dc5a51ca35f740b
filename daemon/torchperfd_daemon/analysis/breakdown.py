"""Splits device time into compute, communication, copies, their exposed parts, and idle time.

Communication and copies are exposed if nothing more useful runs at the same time: a collective beside a
matrix product costs nothing, and the same collective alone costs all of its time. Communication kernels
whose arguments do not name a process group are recognised by name: those of collective libraries, and code
that reads peers' memory.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from torchperfd_daemon.analysis.categories import COPY, DEVICE, KERNEL, LAUNCHES, WAIT
from torchperfd_daemon.analysis.intervals import Cover
from torchperfd_daemon.analysis.trace import Flags, Int64, Trace
from torchperfd_daemon.errors import UsageError

# Inductor names a kernel after the operators that it fuses, waits for collectives among them, but none of
# its kernels communicates. A fused matrix product and collective counts as compute, which most of it is.
_COMPUTE: Final = re.compile(
    r"^triton_(?:poi|red|per|tem|for|unk|mm|spl|mix)_"
    r"|(?:warp|block|quad|thread|lane|cta|wave)_?all_?reduce"
    r"|gemm|mat_?mul",
    re.IGNORECASE,
)
# Names with these are communication in any case.
_LIBRARIES: Final = (
    r"nccl|rccl|hccl|msccl|multimem|symm_mem|deep_ep|::ep::|nvshmem|cross_device_reduce"
    # Vendors' own libraries: Cambricon, Moore Threads and MetaX, Enflame, Intel, FlagCX.
    r"|(?<![a-z])(?:cncl|mccl|eccl|xccl|flagcx)|oneccl|(?<![a-z])ccl(?:_|::)|Rt64_(?:128_)?PCIE"
    r"|hcom_|(?<![a-z])(?:gloo|ucc|mori|uccl|pplx)::|rocshmem|ishmem|aclshmem"
    r"|quick_?reduce|userbuffers|mnnvl|symmetric_memory|nvls_|lamport"
)
# These are communication unless the name is one of those above.
_COLLECTIVES: Final = (
    r"all_?reduce|all_?gather(?!_copy)|reduce_?scatter|all_?to_?all|a2a(?:dispatch|combine)"
    r"|(?<![a-z])ep_?(?:dispatch|combine)|(?:put|wait)_signal_kernel|symm\w*_barrier|(?:one|two)_?shot_(?:pull|push)"
)
_LIBRARY: Final = re.compile(_LIBRARIES, re.IGNORECASE)
_COLLECTIVE: Final = re.compile(_COLLECTIVES, re.IGNORECASE)


def communicates(further: str | None = None) -> Callable[[str], bool]:
    """Return a function that tests whether a name is a communication kernel's.

    Args:
        further: A regular expression for names that count as well.

    Raises:
        UsageError: ``further`` is no regular expression.
    """
    try:
        asked_for = re.compile(further) if further else None
    except re.error as error:
        raise UsageError(f"{further!r} is no regular expression: {error}") from None

    def is_communication(name: str) -> bool:
        if asked_for is not None and asked_for.search(name):
            return True
        if name.startswith("triton_") and _COMPUTE.match(name):
            return False
        if _LIBRARY.search(name):
            return True
        return _COLLECTIVE.search(name) is not None and _COMPUTE.search(name) is None

    return is_communication


@dataclass(frozen=True, slots=True)
class Breakdown:
    """The use of a device in one window of time. All times in ns.

    ``compute``, ``comm``, ``memcpy`` and ``busy`` are the lengths of unions of intervals: two kernels at
    once count once.

    Attributes:
        window_ns: Time from the first start to the last end, waits of the device included; for a step, its
            host time.
        busy_ns: Time in which anything ran.
        compute_ns: Time in which a kernel other than communication, or a fill, ran.
        comm_ns: Time in which a communication kernel ran.
        exposed_comm_ns: Time in which communication ran without compute.
        exposed_memcpy_ns: Time in which a copy ran without compute or communication.
        overlap_ns: Time in which communication and compute ran together.
    """

    n_gpu_events: int
    window_ns: int
    busy_ns: int
    compute_ns: int
    comm_ns: int
    memcpy_ns: int
    exposed_comm_ns: int
    exposed_memcpy_ns: int
    overlap_ns: int

    @property
    def idle_ns(self) -> int:
        return self.window_ns - self.busy_ns

    @property
    def comm_comp_overlap_pct(self) -> float:
        """The part of communication that compute hides, in percent; 0 without communication."""
        return 100 * self.overlap_ns / self.comm_ns if self.comm_ns else 0.0


@dataclass(frozen=True, slots=True)
class Kernel:
    """All calls of the kernels of one name; ``sum_ns`` adds up durations, side by side or not."""

    name: str
    sum_ns: int
    calls: int

    @property
    def mean_ns(self) -> float:
        return self.sum_ns / self.calls


@dataclass(frozen=True, slots=True)
class Device:
    """One device of several.

    Attributes:
        name: The device's number, or its name in the file.
    """

    name: str
    breakdown: Breakdown
    kernel_ns: int


class DeviceTime:
    """The device events of one trace, sorted into compute, communication and copies.

    Attributes:
        window: The first start and the last end, waits of the device included; zeros without device events.

    Raises:
        UsageError: ``comm_pattern`` is no regular expression.
    """

    def __init__(self, trace: Trace, comm_pattern: str | None = None) -> None:
        self.rows = np.flatnonzero(trace.of_categories(DEVICE))
        self._trace = trace
        self._start, self._end = trace.start[self.rows], trace.end[self.rows]
        named = trace.are_named(self.rows, communicates(comm_pattern))
        self.comm = self._is(KERNEL) & (trace.in_group[self.rows] | named)
        self._memcpy = self._is(COPY)
        self._compute = ~self.comm & ~self._memcpy
        self._waits = np.flatnonzero(trace.of_categories({WAIT}))
        self.window = self._window(np.ones(len(self.rows), dtype=np.bool_), self._waits)

    def all(self) -> Breakdown:
        """Return the breakdown of every device event in the file."""
        return self._of(np.ones(len(self.rows), dtype=np.bool_), self._waits)

    def linked(self) -> Breakdown:
        """Return the breakdown of those events whose launch is in the file."""
        trace = self._trace
        launched = trace.correlation[trace.of_categories(LAUNCHES)]
        own = trace.correlation[self.rows]
        return self._of(np.isin(own, launched[launched >= 0]), self._waits)

    def within(self, windows: Sequence[tuple[int, int]]) -> list[Breakdown]:
        """Return a breakdown of each window, of all events as far as they lie in it."""
        starts = np.array([start for start, _ in windows], dtype=np.int64)
        ends = np.array([end for _, end in windows], dtype=np.int64)
        every = np.ones(len(self.rows), dtype=np.bool_)
        lengths = [cover.up_to(ends) - cover.up_to(starts) for cover in self._covers(every)]
        columns = np.column_stack((self._touching(starts, ends), ends - starts, *lengths)).tolist()
        return [_breakdown(*row) for row in columns]

    def kernels(self) -> list[Kernel]:
        """Return the kernels by name, most time first."""
        rows = self._is(KERNEL)
        names = self._trace.name[self.rows][rows]
        calls = np.bincount(names, minlength=len(self._trace.names))
        sums = np.zeros(len(calls), dtype=np.int64)
        np.add.at(sums, names, (self._end - self._start)[rows])
        table = [
            Kernel(self._trace.names[name], int(sums[name]), int(calls[name]))
            for name in np.flatnonzero(calls).tolist()
        ]
        return sorted(table, key=lambda kernel: (-kernel.sum_ns, kernel.name))

    def devices(self) -> list[Device]:
        """Return each device, in order of name; empty if there is only one."""
        threads = self._trace.threads
        names = {
            number: str(threads[number][0]) for number in np.unique(self._trace.thread[self.rows]).tolist()
        }
        if len(set(names.values())) < 2:
            return []
        kernels, durations = self._is(KERNEL), self._end - self._start
        found = []
        for name in sorted(set(names.values()), key=lambda each: (len(each), each)):
            scope = np.isin(self._trace.thread[self.rows], [at for at, each in names.items() if each == name])
            waits = [row for row in self._waits.tolist() if str(threads[self._trace.thread[row]][0]) == name]
            breakdown = self._of(scope, np.array(waits, dtype=np.int64))
            found.append(Device(name, breakdown, int(durations[scope & kernels].sum())))
        return found

    def _is(self, category: str) -> Flags:
        return self._trace.of_categories({category})[self.rows]

    def _of(self, scope: Flags, waits: Int64) -> Breakdown:
        count = int(scope.sum())
        if not count:
            return _breakdown(0, 0, 0, 0, 0, 0, 0)
        start, end = self._window(scope, waits)
        return _breakdown(count, end - start, *(cover.length for cover in self._covers(scope)))

    def _window(self, scope: Flags, waits: Int64) -> tuple[int, int]:
        if not scope.any():
            return 0, 0
        starts = np.concatenate((self._start[scope], self._trace.start[waits]))
        ends = np.concatenate((self._end[scope], self._trace.end[waits]))
        return int(starts.min()), int(ends.max())

    def _covers(self, scope: Flags) -> tuple[Cover, ...]:
        """Return what compute, communication, copies, the first two, and all three cover."""
        compute, comm, memcpy = (
            Cover(self._start[chosen], self._end[chosen])
            for chosen in (scope & self._compute, scope & self.comm, scope & self._memcpy)
        )
        useful = compute | comm
        return compute, comm, memcpy, useful, useful | memcpy

    def _touching(self, starts: Int64, ends: Int64) -> Int64:
        """Return how many events begin before each end and end after each start."""
        begun = np.searchsorted(np.sort(self._start), ends, side="left")
        over = np.searchsorted(np.sort(self._end), starts, side="right")
        touching: Int64 = np.maximum(begun - over, 0)
        return touching


def _breakdown(
    count: int, window: int, compute: int, comm: int, memcpy: int, useful: int, busy: int
) -> Breakdown:
    return Breakdown(
        n_gpu_events=count,
        window_ns=window,
        busy_ns=busy,
        compute_ns=compute,
        comm_ns=comm,
        memcpy_ns=memcpy,
        exposed_comm_ns=useful - compute,
        exposed_memcpy_ns=busy - useful,
        overlap_ns=compute + comm - useful,
    )
