"""The far end of the distribution of step times: steps off and on by turns, a few of each at a time.

So that the machine is the same for both, which it is not for half a second. What torchperfd does once per
second must then be made to fall on steps that are on, and as often as if all of them were: its pump is woken
up after as many of those as fit into a second, and what follows stays on until it is done.
"""

import gc
import statistics
import threading
import time
from collections.abc import Iterator
from queue import Empty
from typing import Any, Final

from benchmarks.overhead.contestants import Contestant, Torchperfd
from benchmarks.overhead.worker import Round, Steps
from benchmarks.overhead.workload import WARM_STEPS

_BLOCK_STEPS: Final = 5
_AFTERMATH_STEPS: Final = 20
"""What a turn of the pump sets off (packing, sending) is over within a dozen milliseconds."""
_CHUNK_STEPS: Final = 1000


class Beat:
    """Stands in for what the pump waits on; a second is over once so many steps were on.

    Args:
        client: Whose pump.
        per_second: Steps in a second.
    """

    def __init__(self, client: Any, per_second: int) -> None:
        self._overhead = client._replay.overhead
        self._per_second = per_second
        self._struck = threading.Semaphore(0)
        self._queue = client._pump._wake
        self._on = 0
        client._pump._wake = self
        self._queue.put(None)  # it waits there by now

    def count(self) -> bool:
        """Another step was on; return whether it is time for a turn."""
        self._on += 1
        return self._on >= self._per_second // (4 if self._overhead.measuring else 1)

    def strike(self) -> None:
        """Have the pump turn."""
        self._on = 0
        self._struck.release()

    # What the pump calls.

    def get(self, timeout: float) -> None:
        """Wait for the beat, whatever the wall clock says."""
        while not self._struck.acquire(timeout=timeout):
            if not self._queue.empty():
                self._queue.get()
                return
        raise Empty

    def put(self, item: None) -> None:
        """Turn at once."""
        self._queue.put(item)


def measure_tail(contestant: Contestant, seconds: float) -> Round:
    """Measure for so long: attach, alternate, check that all was seen, detach."""
    workload, measured = contestant.workload, Round()
    gc.collect()
    contestant.attach()
    workload.ends.clear()
    workload.plain(workload.loader)
    ends = [end for _, end in workload.ends]
    usual = statistics.median(after - before for before, after in zip(ends, ends[1:], strict=False))
    beat = Beat(contestant.client, round(1e9 / usual)) if isinstance(contestant, Torchperfd) else None
    times: list[tuple[bool, int]] = []
    on_steps = len(workload.loader)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        blocks = _blocks(contestant, beat)
        began = time.perf_counter_ns()
        is_on, is_warm = next(blocks)
        for _ in workload.steps(workload.loader):
            ended = time.perf_counter_ns()
            on_steps += is_on
            if not is_warm:
                times.append((is_on, ended - began))
            is_on, is_warm = next(blocks)
            began = time.perf_counter_ns()
    contestant.on()
    contestant.train(workload.warm_loader)  # the last step ends with the draw after it
    for start in range(0, len(times), _CHUNK_STEPS):
        _add(measured, times[start : start + _CHUNK_STEPS])
    contestant.check(on_steps + WARM_STEPS)
    contestant.detach()
    return measured


def _blocks(contestant: Contestant, beat: Beat | None) -> Iterator[tuple[bool, bool]]:
    """Switch off and on; tell of each step whether it is on, and whether it only comes after a switch."""
    while True:
        contestant.off()
        for number in range(WARM_STEPS + _BLOCK_STEPS):
            yield False, number < WARM_STEPS
        contestant.on()
        steps = WARM_STEPS + _BLOCK_STEPS
        number, due = 0, False
        while number < steps:
            if due and number == WARM_STEPS and beat is not None:
                steps += _AFTERMATH_STEPS
                beat.strike()
            yield True, number < WARM_STEPS
            number += 1
            due = beat is not None and beat.count()


def _add(measured: Round, times: list[tuple[bool, int]]) -> None:
    """Add the times of some steps, and how they compare with the usual one among them."""
    usual = statistics.median(ns for _, ns in times)
    for is_on, ns in times:
        steps: Steps = measured.on if is_on else measured.off
        steps.wall_ns.append(ns)
        steps.relative.append(ns / usual)
