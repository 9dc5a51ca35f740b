"""What a CUDA event at a phase boundary costs, to record and to read; and CUDA graphs captured meanwhile."""

import statistics
import time
from collections.abc import Callable
from typing import Any, Final

import torch
from benchmarks.gpu_proof.analysed_capture import attached
from benchmarks.gpu_proof.machine import Machine
from benchmarks.gpu_proof.outcome import Bound, Outcome
from benchmarks.gpu_proof.workloads import Training, resnet18

from torchperfd.hooks.accelerator import cuda_device_times
from torchperfd.hooks.device_clock import DeviceTimes
from torchperfd.steps.phases import FORWARD, TRAIN

TITLE: Final = "Cost of CUDA events, and CUDA graphs captured meanwhile"
SECONDS: Final = 30

_BATCH: Final = 200
_BATCHES: Final = 10


def run(machine: Machine) -> Outcome:
    """Measure each operation on an idle device and on a busy one."""
    outcome = Outcome(["operation", "idle device", "busy device"])
    if machine.is_rehearsal:
        outcome.notes.append("Only a GPU shows what its events cost.")
        return outcome
    event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    stream = torch.cuda.current_stream()
    times = cuda_device_times()
    if times is None:
        outcome.bounds.append(Bound("there are device times on this machine", held=False))
        return outcome
    operations: list[tuple[str, Callable[[], object]]] = [
        ("a mark of the client", lambda: _mark(times)),
        ("event.record()", event.record),
        ("event.record(stream)", lambda: event.record(stream)),
        ("torch.cuda.current_stream()", torch.cuda.current_stream),
        ("torch.cuda.is_current_stream_capturing()", torch.cuda.is_current_stream_capturing),
        ("event.query()", event.query),
        ("a launch of a short kernel", _kernel()),
    ]
    event.record()
    for name, operation in operations:
        cells = [_typical(operation, times, is_busy=is_busy) for is_busy in (False, True)]
        outcome.rows.append([name, *cells])
    outcome.rows.append(["reading an interval on the client's thread", _reading(times), ""])
    outcome.bounds.append(_graph_bound(machine))
    return outcome


def _mark(times: DeviceTimes) -> int:
    """Record an event as the client does, however many there were before."""
    times.allow()
    return times.mark()


def _kernel() -> Callable[[], object]:
    tensor = torch.zeros(64, device="cuda")
    return lambda: tensor.add_(1)


def _typical(operation: Callable[[], object], times: DeviceTimes, *, is_busy: bool) -> str:
    """Return the median and the deciles, in µs, of calls while the device is idle or has work."""
    work = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    costs: list[int] = []
    for _ in range(_BATCHES):
        torch.cuda.synchronize()
        for _ in range(8 if is_busy else 0):
            torch.mm(work, work)
        for _ in range(_BATCH):
            began = time.perf_counter_ns()
            operation()
            costs.append(time.perf_counter_ns() - began)
        torch.cuda.synchronize()
        _read_all(times)
    deciles = statistics.quantiles(costs, n=10)
    return f"{statistics.median(costs) / 1e3:.1f} µs ({deciles[0] / 1e3:.1f} to {deciles[8] / 1e3:.1f})"


def _read_all(times: DeviceTimes) -> None:
    """Have the events that were recorded return to the pool, as flushes do."""
    cuda_event_id = _mark(times)
    times.boundary(FORWARD, cuda_event_id)
    times.close(TRAIN)
    torch.cuda.synchronize()
    times.collect()


def _reading(times: DeviceTimes) -> str:
    """Return what it takes to read one interval."""
    costs = []
    for _ in range(_BATCHES):
        for _ in range(_BATCH):
            times.boundary(FORWARD, _mark(times))
        times.close(TRAIN)
        torch.cuda.synchronize()
        began = time.perf_counter_ns()
        times.collect()
        costs.append((time.perf_counter_ns() - began) / _BATCH)
    return f"{statistics.median(costs) / 1e3:.1f} µs"


def _graph_bound(machine: Machine) -> Bound:
    """Capture a graph in the strictest mode while the client's thread reads events."""
    training = Training(resnet18(machine), machine)
    graph, result = torch.cuda.CUDAGraph(), torch.zeros((), device="cuda")
    try:
        with attached(training.workload.model):
            training.run(20)
            with torch.cuda.graph(graph, capture_error_mode="global"):
                for _ in range(8):
                    result += 1
                    time.sleep(0.2)  # the client reads once a second
            graph.replay()
            is_right = result.item() == 8
    except RuntimeError as error:
        return Bound(f"a CUDA graph captured meanwhile: {str(error).splitlines()[0]}", held=False)
    return Bound(
        "a CUDA graph captured in the strictest mode while the client reads events is right", is_right
    )
