"""Loops that a host runs with a device in virtual time, and the traces that Kineto would write of them.

A loop is written once and run twice: as it is, and while it is recorded, which makes the host slower as CUPTI
does. Nothing sleeps, so times are exact on any machine. The rules of the device are those of a GPU: a stream
runs in the order of launches, a launch takes some µs to arrive, a host that is 1,024 launches ahead waits,
copies from pageable memory are staged by the host, and reading a value waits for the stream.

The module shares nothing with the analyser.
"""

import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

US: Final = 1_000
MS: Final = 1_000_000
QUEUE_LENGTH: Final = 1024
_ARRIVES_NS: Final = 4 * US
_GAP_NS: Final = US
_LAUNCH_NS: Final = 5 * US
_WAKES_NS: Final = 8 * US
# The host copies to staging memory with 6 GB/s, and PCIe 5 moves 55 GB/s.
_STAGED: Final = 6.0
_PCIE: Final = 50.0
_INPUTS: Final[dict[str, Any]] = {"Input Dims": [[8, 8]], "Input type": ["float"]}
# Streams are threads of the trace with numbers from here on.
_STREAMS: Final = 100
_ORIGIN_NS: Final = 7_000_000_000_000_000


@dataclass(slots=True)
class Machine:
    """A host thread and its device, in virtual time.

    Attributes:
        slowdown: How much longer the host takes for calls that are recorded; 1 when nothing is.
        now: The host's time in ns.
        events: The trace's events, if it is recorded.
    """

    slowdown: float = 1.0
    now: int = 0
    events: list[dict[str, Any]] = field(default_factory=list)
    _streams: dict[int, int] = field(default_factory=dict)
    _queued: deque[int] = field(default_factory=deque)
    _number: int = 0

    @property
    def drained(self) -> int:
        """When all that was launched has ended."""
        return max([self.now, *self._streams.values()])

    def record(self, name: str, category: str, start: int, end: int, thread: int = 1, **args: Any) -> None:
        """Add an event to the trace."""
        self.events.append(
            {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": thread, "args": args}
            | {"ts": (_ORIGIN_NS + start) / 1000, "dur": (end - start) / 1000}
        )

    def work(self, ns: int) -> None:
        """Run Python between calls."""
        self.now += round(ns * self.slowdown)

    def span(self, name: str, body: Callable[[], None]) -> None:
        """Run something under an annotation."""
        start = self.now
        body()
        self.record(name, "user_annotation", start, self.now)

    def compute(self, operator: str, ns: int) -> None:
        """Run an operator on the host."""
        start, self.now = self.now, self.now + ns
        self.record(operator, "cpu_op", start, self.now, **_INPUTS)

    def launch(
        self,
        operator: str,
        kernels: list[tuple[str, int]],
        host_ns: int = 10 * US,
        *,
        stream: int = 7,
        dtype: str = "c10::BFloat16",
        call: str = "cudaLaunchKernel",
    ) -> None:
        """Run an operator that launches kernels, each with a name and a duration; a graph in one call."""
        start = self.now
        self.work(max(host_ns - _LAUNCH_NS * len(kernels), US))
        calls = [kernels] if call == "cudaGraphLaunch" else [[each] for each in kernels]
        for launched in calls:
            self._number += 1
            begun = self.now
            self._wait_for_room(len(launched))
            self.work(_LAUNCH_NS)
            self.record(call, "cuda_runtime", begun, self.now, correlation=self._number)
            for name, ns in launched:
                self._run(name, ns, stream, self.now + _ARRIVES_NS)
        self.work(US)
        inputs: dict[str, Any] = {"Input Dims": [[8, 8], [8, 8]], "Input type": [dtype, dtype]}
        self.record(operator, "cpu_op", start, self.now, **inputs)

    def item(self) -> None:
        """Read a value of the device."""
        start = self.now
        self.work(3 * US)
        self._number += 1
        called = self.now
        end = self._run("Memcpy DtoH (Device -> Pageable)", 2 * US, 7, called + _ARRIVES_NS, "gpu_memcpy")
        self.work(_LAUNCH_NS)
        self.record("cudaMemcpyAsync", "cuda_runtime", called, self.now, correlation=self._number)
        waits = self.now
        self.now = max(self.now + US, end + _WAKES_NS)
        self.record("cudaStreamSynchronize", "cuda_runtime", waits, self.now)
        self.work(2 * US)
        self.record("aten::item", "cpu_op", start, self.now)

    def copy_in(self, size: int, *, pinned: bool) -> None:
        """Copy a batch of so many bytes to the device."""
        start = self.now
        self.work(5 * US)
        self._number += 1
        called = self.now
        if pinned:
            self._run(
                "Memcpy HtoD (Pinned -> Device)", round(size / _PCIE), 7, called + _ARRIVES_NS, "gpu_memcpy"
            )
            self.work(_LAUNCH_NS)
        else:
            # The host waits for the stream, and stages the copy piece by piece while the device copies.
            self.now = max(self.now, self._streams.get(7, 0))
            name = "Memcpy HtoD (Pageable -> Device)"
            end = self._run(name, round(size / _STAGED), 7, self.now + _ARRIVES_NS, "gpu_memcpy")
            self.now = end + _WAKES_NS
        self.record("cudaMemcpyAsync", "cuda_runtime", called, self.now, correlation=self._number)
        self.record("aten::copy_", "cpu_op", start, self.now)

    def _wait_for_room(self, count: int) -> None:
        while self._queued and self._queued[0] <= self.now:
            self._queued.popleft()
        if len(self._queued) + count > QUEUE_LENGTH:
            begun = self.now
            while self._queued and len(self._queued) + count > QUEUE_LENGTH:
                self.now = max(self.now, self._queued.popleft())
            self.record("Command Buffer Full", "overhead", begun, self.now)

    def _run(self, name: str, ns: int, stream: int, ready: int, category: str = "kernel") -> int:
        start = max(ready, self._streams.get(stream, 0) + _GAP_NS)
        self._streams[stream] = start + ns
        self._queued.append(start)
        args = {"correlation": self._number, "device": 0, "stream": stream}
        self.record(name, category, start, start + ns, stream + _STREAMS, **args)
        return start + ns


def _end(event: dict[str, Any]) -> float:
    return float(event["ts"] + event["dur"]) * 1000 - _ORIGIN_NS


Loop = Callable[[Machine], Callable[[], None]]
"""From a machine to one step of a loop on it."""


def step_ns(loop: Loop, steps: int = 40, warm: int = 20) -> float:
    """Return the mean step of a loop that is not recorded, in ns, after some to warm up."""
    machine = Machine()
    step = loop(machine)
    for _ in range(warm):
        step()
    begun = machine.drained
    for _ in range(steps):
        step()
    return (machine.drained - begun) / steps


def write_trace(
    loop: Loop,
    path: Path,
    *,
    steps: int = 8,
    slowdown: float = 1.0,
    facts: dict[str, Any] | None = None,
    **more: Any,
) -> None:
    """Write the trace of some steps of a loop that ran before.

    Args:
        slowdown: How much longer the host takes for what is recorded.
        facts: What torchperfd's client adds to its traces; the length of unrecorded steps by itself.
        more: Further fields of the document.
    """
    machine = Machine()
    step = loop(machine)
    for _ in range(20):
        step()
    # What was launched before and has yet to run is recorded without its launch.
    machine.events = [each for each in machine.events if each["tid"] > _STREAMS and _end(each) > machine.now]
    machine.slowdown = slowdown
    for number in range(steps):
        machine.span(f"ProfilerStep#{number}", step)
    events = machine.events
    if facts is not None:
        more["torchperfd"] = {"unrecorded_step_ns": round(step_ns(loop))} | facts
    path.write_text(json.dumps({"schemaVersion": 1, **more, "traceEvents": events}))
