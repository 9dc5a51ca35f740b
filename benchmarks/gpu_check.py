"""Whether device times are true, and what they cost, on a real GPU.

    python -m benchmarks.gpu_check

Four checks; exits 1 when one fails:

- the device time of every phase that takes 2 % of a step or more, beside what torch.profiler's trace
  of the same steps reports: within 5 %;
- the time of a step with the client attached and detached, in turns: the median change below 0.5 %;
- a CUDA graph captured in CUDA's strictest mode while the client reads events on its own thread;
- what marking one boundary costs the training thread (printed, not judged).

Without a GPU there is nothing to check: it prints that and exits 0.
"""

import json
import statistics
import sys
import tempfile
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.data import DataLoader, TensorDataset

import torchperfd
from torchperfd.client import Client
from torchperfd.device.clock import cuda_device_times
from torchperfd.v1.contract import PHASES

WIDTH: Final = 4096
LAYERS: Final = 6
STEPS: Final = 20
ALTERNATIONS: Final = 24
MARKS: Final = 2000
TRUE_WITHIN: Final = 0.05
JUDGED_FROM: Final = 0.02
CHANGE_BELOW: Final = 0.005

_RANGE: Final = "gpu_check:"
_ON_DEVICE: Final = frozenset(("kernel", "gpu_memcpy", "gpu_memset"))
_LAUNCHES: Final = frozenset(("cuda_runtime", "cuda_driver"))


class Training:
    """A loop that keeps the device busy: the host is ahead of it all the time."""

    def __init__(self, device: str, width: int = WIDTH) -> None:
        layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(width, width), nn.ReLU())]
        self.model = nn.Sequential(*layers).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.batch = torch.randn(width, width, device=device)

    def run(self, steps: int) -> None:
        """Train for that many steps, in a loop of their own, with every phase annotated."""
        batches = iter(DataLoader(TensorDataset(self.batch.expand(steps, -1, -1)), batch_size=None))
        while True:
            with record_function(f"{_RANGE}data"):
                batch = next(batches, None)
            if batch is None:
                return
            (inputs,) = batch
            with record_function(f"{_RANGE}zero_grad"):
                self.optimizer.zero_grad()
            with record_function(f"{_RANGE}forward"):
                output = self.model(inputs)
            with record_function(f"{_RANGE}loss"):
                loss = output.square().mean()
            with record_function(f"{_RANGE}backward"):
                loss.backward()
            with record_function(f"{_RANGE}optimizer"):
                self.optimizer.step()


def traced_ns(events: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return each phase's nanoseconds on the device from a trace, all steps together.

    A phase has the device from the end of the last work launched before it to the end of the last
    work launched within it, as events recorded at its boundaries see it. Work is found by where on
    the host it was launched, whatever the thread.
    """
    starts: list[tuple[float, float, str]] = []
    launched: dict[int, float] = {}
    done: list[tuple[int, float, float]] = []
    for event in events:
        category, name = event.get("cat"), event.get("name", "")
        if category == "user_annotation" and name.startswith(_RANGE):
            starts.append((event["ts"], event["ts"] + event["dur"], name.removeprefix(_RANGE)))
        elif category in _LAUNCHES and "correlation" in event.get("args", {}):
            launched[event["args"]["correlation"]] = event["ts"]
        elif category in _ON_DEVICE:
            done.append((event["args"]["correlation"], event["ts"], event["ts"] + event["dur"]))
    starts.sort()
    begins = [begin for begin, _, _ in starts]
    work = sorted((launched[number], begin, end) for number, begin, end in done if number in launched)

    total: dict[str, float] = defaultdict(float)
    reached = work[0][1] if work else 0.0
    for at, _, end in work:
        index = bisect_right(begins, at) - 1
        phase = starts[index][2] if index >= 0 and at <= starts[index][1] else "other"
        if end > reached:
            total[phase] += (end - reached) * 1e3
            reached = end
    return dict(total)


def reported_ns(client: Client) -> dict[str, int]:
    """Return each phase's nanoseconds on the device so far, from the client."""
    torch.cuda.synchronize()
    client.report()
    time.sleep(0.3)  # a flush may have been under way
    phases = client.report().totals.train.phases
    return {name: phases[slot].device_ns for slot, name in enumerate(PHASES)}


def check_truth(training: Training) -> bool:
    """Compare phase by phase and print a table."""
    client = torchperfd.attach(model=training.model)
    try:
        training.run(STEPS)
        before = reported_ns(client)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            training.run(STEPS)
            torch.cuda.synchronize()
        after = reported_ns(client)
    finally:
        client.detach()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        profiler.export_chrome_trace(str(path))
        traced = traced_ns(json.loads(path.read_text())["traceEvents"])
    return judge({name: after[name] - before[name] for name in PHASES}, traced)


def judge(reported: Mapping[str, float], traced: Mapping[str, float]) -> bool:
    """Print both for the phases that have any time on the device; return whether they agree."""
    whole = sum(traced.values())
    fine = whole > 0
    print(f"{'phase':<12} {'client':>12} {'trace':>12} {'off by':>8}   of the device's time, {STEPS} steps")
    for name in sorted(set(reported) | set(traced), key=lambda name: -traced.get(name, 0.0)):
        ours, theirs = reported.get(name, 0), traced.get(name, 0.0)
        judged = max(ours, theirs) >= JUDGED_FROM * whole
        if not ours and not theirs:
            continue
        off = ours / theirs - 1 if theirs else float("inf")
        fine = fine and (not judged or abs(off) <= TRUE_WITHIN)
        verdict = ("ok" if abs(off) <= TRUE_WITHIN else "FAILED") if judged else "too short to judge"
        print(f"{name:<12} {ours / 1e6:>9.3f} ms {theirs / 1e6:>9.3f} ms {off:>+8.1%}   {verdict}")
    return fine


def check_cost(training: Training) -> bool:
    """Time loops with and without the client, alternating."""
    changes = []
    for number in range(ALTERNATIONS):
        seconds: dict[bool, float] = {}
        for attached in (False, True) if number % 2 else (True, False):
            with watched(training, attached):
                training.run(3)
                seconds[attached] = timed(lambda: training.run(STEPS))
        changes.append(seconds[True] / seconds[False] - 1)
    quartiles = statistics.quantiles(changes, n=4)
    fine = quartiles[1] < CHANGE_BELOW
    print(
        f"step time with the client: {quartiles[1]:+.2%} (quartiles {quartiles[0]:+.2%} to"
        f" {quartiles[2]:+.2%}, {ALTERNATIONS} alternations of {STEPS} steps)   {'ok' if fine else 'FAILED'}"
    )
    return fine


@contextmanager
def watched(training: Training, attached: bool) -> Iterator[None]:
    """Attach for the while, or do not."""
    client = torchperfd.attach(model=training.model) if attached else None
    try:
        yield
    finally:
        if client is not None:
            client.detach()


def timed(action: Callable[[], None]) -> float:
    """Return the seconds until the device has done it all."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    action()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def check_capture(training: Training) -> bool:
    """Capture a graph that takes its time while there are events to read."""
    graph, result = torch.cuda.CUDAGraph(), torch.zeros((), device="cuda")
    with watched(training, attached=True):
        training.run(STEPS)
        try:
            with torch.cuda.graph(graph, capture_error_mode="global"):
                for _ in range(8):
                    result += 1
                    time.sleep(0.1)  # the client reads four times a second
            graph.replay()
            fine = result.item() == 8
        except RuntimeError as error:
            print(str(error).splitlines()[0])
            fine = False
    print(f"a CUDA graph captured meanwhile   {'ok' if fine else 'FAILED'}")
    return fine


def print_mark_cost() -> None:
    """Say what one boundary costs the training thread."""
    times = cuda_device_times()
    if times is None:
        print("one mark: not measured, there are no device times here")
        return
    costs = []
    for _ in range(MARKS):
        began = time.perf_counter_ns()
        times.mark()
        costs.append(time.perf_counter_ns() - began)
    deciles = statistics.quantiles(costs, n=10)
    print(f"one mark: {statistics.median(costs):.0f} ns (p10 {deciles[0]:.0f}, p90 {deciles[8]:.0f})")


def main() -> int:
    """Check and print."""
    if not torch.cuda.is_available():
        print("not run: this machine has no GPU that torch can use")
        return 0
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    torch.set_float32_matmul_precision("high")
    training = Training("cuda")
    training.run(STEPS)
    fine = [check(training) for check in (check_truth, check_cost, check_capture)]
    print_mark_cost()
    return 0 if all(fine) else 1


if __name__ == "__main__":
    sys.exit(main())
