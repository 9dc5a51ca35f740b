"""The tail of the distribution of step times: a few steps off and a few on, alternating.

So that the machine is the same for both, which it is not for half a second. What torchperfd does every
few seconds must then be made to fall on steps that are on, and as often as if all of them were. So its
flusher is woken up after as many of those as fit into that time, and what follows stays on until it is done.
"""

import gc
import itertools
import statistics
import threading
import time
from queue import Empty
from typing import Any, Final

from benchmarks.overhead.contestants import Contestant
from benchmarks.overhead.worker import Round, Steps
from benchmarks.overhead.workload import WARM_STEPS

from torchperfd.link.flush_schedule import FlushState, flush_interval

_SETTLING_STEPS: Final = 2
"""After a switch the interpreter looks up anew what it had remembered."""
_BLOCK_STEPS: Final = 5
_AFTERMATH_STEPS: Final = 40
"""What a flush sets off (packing, sending) is over within two dozen milliseconds."""
_CHUNK_STEPS: Final = 1000
_PASSES_AHEAD: Final = 7
"""Until the flusher has found its interval: it flushes less often in the long run than at first."""


class Beat:
    """Stands in for what the flusher waits on; a second is over once so many steps were on.

    Args:
        client: Whose flusher.
        per_second: Steps in a second.
    """

    def __init__(self, client: Any, per_second: int) -> None:
        self._flusher = client._flusher
        self._per_second = per_second
        self._struck = threading.Semaphore(0)
        self._queue = self._flusher._wake
        self._on = 0
        self._steps = self._steps_to_flush()
        self._flusher._wake = self
        self._queue.put(None)  # it waits there by now

    def count(self) -> bool:
        """Another step that counts was on; return whether it is time for a flush."""
        self._on += 1
        return self._on >= self._steps

    def strike(self) -> None:
        """Have the flusher flush."""
        self._on = 0
        self._struck.release()
        self._steps = self._steps_to_flush()

    def _steps_to_flush(self) -> float:
        flusher = self._flusher
        state = FlushState(time.time(), flusher.totals.train.steps, flusher.step_seconds())
        return self._per_second * flush_interval(state)

    # What the flusher calls.

    def get(self, timeout: float) -> None:
        """Wait for the beat, whatever the wall clock says."""
        while not self._struck.acquire(timeout=timeout):
            if not self._queue.empty():
                self._queue.get()
                return
        raise Empty

    def put(self, item: None) -> None:
        """Flush at once."""
        self._queue.put(item)


class Alternation:
    """Switches a contestant off and on, every few steps.

    Args:
        contestant: Attached, and on.
        beat: When our flusher has to flush; None where nothing of the kind is.

    Attributes:
        is_on: Whether the step that comes is.
        on_steps: How many were on.
    """

    def __init__(self, contestant: Contestant, beat: Beat | None) -> None:
        self.is_on = True
        self.on_steps = 0
        self._contestant = contestant
        self._beat = beat
        self._due = False
        self._done = self._steps = 0
        self._switch()

    @property
    def is_timed(self) -> bool:
        """Whether that step counts: not where it comes right after a switch."""
        return self._done >= _SETTLING_STEPS

    def end_step(self) -> None:
        """A step has ended: do what comes before the next."""
        self._done += 1
        if self.is_on:
            self.on_steps += 1
            if self._beat is not None:
                self._due |= self._done > _SETTLING_STEPS and self._beat.count()
                if self._due and self._done == _SETTLING_STEPS:
                    self._due = False
                    self._steps += _AFTERMATH_STEPS
                    self._beat.strike()
        if self._done == self._steps:
            self._switch()

    def _switch(self) -> None:
        self.is_on = not self.is_on
        self._done, self._steps = 0, _SETTLING_STEPS + _BLOCK_STEPS
        if self.is_on:
            self._contestant.on()
        else:
            self._contestant.off()


def measure_tail(contestant: Contestant, seconds: float) -> Round:
    """Measure for so long: attach, alternate, check that all was seen, detach."""
    workload, measured = contestant.workload, Round()
    gc.collect()
    contestant.attach()
    for _ in range(_PASSES_AHEAD):
        workload.ends.clear()
        workload.plain(workload.loader)
    usual = statistics.median(after - before for (_, before), (_, after) in itertools.pairwise(workload.ends))
    beat = Beat(contestant.client, round(1e9 / usual)) if contestant.client is not None else None
    alternation = Alternation(contestant, beat)
    times: list[tuple[bool, int]] = []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        began = time.perf_counter_ns()
        for number, _ in enumerate(workload.steps(workload.loader)):
            ended = time.perf_counter_ns()
            # What begins a pass over the data belongs to no step.
            if alternation.is_timed and number:
                times.append((alternation.is_on, ended - began))
            alternation.end_step()
            began = time.perf_counter_ns()
    contestant.on()
    contestant.train(workload.warm_loader)  # the last step ends with the draw after it
    for start in range(0, len(times), _CHUNK_STEPS):
        _add(measured, times[start : start + _CHUNK_STEPS])
    contestant.check(_PASSES_AHEAD * len(workload.loader) + alternation.on_steps + WARM_STEPS)
    contestant.detach()
    return measured


def _add(measured: Round, times: list[tuple[bool, int]]) -> None:
    """Add the times of some steps, and how they compare with the usual one among them."""
    usual = statistics.median(ns for _, ns in times)
    for is_on, ns in times:
        steps: Steps = measured.on if is_on else measured.off
        steps.wall_ns.append(ns)
        steps.relative.append(ns / usual)
