"""Wall times of steps: a few steps off and a few on, alternating.

So that the machine is the same for both, which it is not for half a second. What torchperfd does every
few seconds must then be made to fall on steps that are on, and as often as if all of them were. So its
flusher is woken up after as many of those as fit into that time, and what follows stays on until it is done.
"""

import gc
import itertools
import math
import statistics
import threading
import time
from dataclasses import dataclass
from queue import Empty
from typing import Any, Final

from benchmarks.overhead.contestants import Contestant
from benchmarks.overhead.worker import Round, Steps
from benchmarks.overhead.workload import WARM_STEPS

from torchperfd.link.outbox import FlushState, flush_interval


@dataclass(frozen=True, slots=True)
class StepLength:
    """How steps of one length are measured.

    Attributes:
        name: For the table.
        limit: The mean may change by this part.
        width: Of the model's hidden layers, which makes a step as long.
        pass_steps: Steps in a pass over the data.
        passes_ahead: Until the flusher has found its interval: it flushes less often in the long run than
            at first.
        settling_steps: Not timed after a switch: the interpreter looks up anew what it had remembered.
        block_steps: Timed between two switches.
        seconds: How long a round takes.
    """

    name: str
    limit: float
    width: int
    pass_steps: int
    passes_ahead: int
    settling_steps: int
    block_steps: int
    seconds: float


STEP_LENGTHS: Final = (
    StepLength("1 ms", 0.02, 192, 1500, 7, 2, 5, 40.0),
    StepLength("10 ms", 0.002, 1024, 80, 1, 1, 3, 60.0),
    StepLength("100 ms", 0.002, 3600, 12, 1, 1, 2, 60.0),
)
_AFTERMATH_S: Final = 0.028
"""What a flush sets off (packing, sending) is over by then."""
_CHUNK_S: Final = 1.0
"""The machine's speed is about the same for so long: steps are compared with the usual one of it."""


class Beat:
    """Stands in for what the flusher waits on; a second is over once so many steps were on.

    Args:
        client: Whose flusher.
        per_second: Steps in a second.
    """

    def __init__(self, client: Any, per_second: float) -> None:
        self._flusher = client.parts.flusher
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
        length: How many steps there are between two switches.
        step_s: What a step takes.

    Attributes:
        is_on: Whether the step that comes is.
        on_steps: How many were on.
    """

    def __init__(self, contestant: Contestant, beat: Beat | None, length: StepLength, step_s: float) -> None:
        self.is_on = True
        self.on_steps = 0
        self._contestant = contestant
        self._beat = beat
        self._settling = length.settling_steps
        self._block = length.block_steps
        self._aftermath = math.ceil(_AFTERMATH_S / step_s)
        self._due = False
        self._done = self._steps = 0
        self._switch()

    @property
    def is_timed(self) -> bool:
        """Whether that step counts: not where it comes right after a switch."""
        return self._done >= self._settling

    def end_step(self) -> None:
        """A step has ended: do what comes before the next."""
        self._done += 1
        if self.is_on:
            self.on_steps += 1
            if self._beat is not None:
                self._due |= self._done > self._settling and self._beat.count()
                if self._due and self._done == self._settling:
                    self._due = False
                    self._steps += self._aftermath
                    self._beat.strike()
        if self._done == self._steps:
            self._switch()

    def _switch(self) -> None:
        self.is_on = not self.is_on
        self._done, self._steps = 0, self._settling + self._block
        if self.is_on:
            self._contestant.on()
        else:
            self._contestant.off()


def measure_wall(contestant: Contestant, length: StepLength) -> Round:
    """Measure a round: attach, alternate, check that all was seen, detach."""
    workload, measured = contestant.workload, Round()
    gc.collect()
    contestant.attach()
    for _ in range(length.passes_ahead):
        workload.ends.clear()
        workload.plain(workload.loader)
    usual = statistics.median(after - before for (_, before), (_, after) in itertools.pairwise(workload.ends))
    beat = Beat(contestant.client, 1e9 / usual) if contestant.client is not None else None
    alternation = Alternation(contestant, beat, length, usual / 1e9)
    times: list[tuple[bool, int]] = []
    until = time.monotonic() + length.seconds
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
    chunk = max(4 * length.block_steps, round(_CHUNK_S * 1e9 / usual))
    for start in range(0, len(times), chunk):
        _add(measured, times[start : start + chunk])
    contestant.check(length.passes_ahead * len(workload.loader) + alternation.on_steps + WARM_STEPS)
    contestant.detach()
    return measured


def _add(measured: Round, times: list[tuple[bool, int]]) -> None:
    """Add the times of some steps, and how they compare with the usual one among them."""
    usual = statistics.median(ns for _, ns in times)
    for is_on, ns in times:
        steps: Steps = measured.on if is_on else measured.off
        steps.wall_ns.append(ns)
        steps.relative.append(ns / usual)
