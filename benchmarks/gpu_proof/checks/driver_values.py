"""The daemon's NVML and GPM values beside ``nvidia-smi -q -x``, idle and under a matmul of known load.

In each state the daemon's collector reads a baseline, and two seconds later once right before and once right
after nvidia-smi. GPM's ratios are means between the baseline and the reading before nvidia-smi.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean
from typing import Final

import pynvml
import torch
from benchmarks.gpu_proof import nvidia_smi
from benchmarks.gpu_proof.machine import Machine
from benchmarks.gpu_proof.nvidia_smi import PCIE_RATE, PROCESS_MEMORY, Key, Values
from benchmarks.gpu_proof.outcome import Bound, Outcome
from benchmarks.gpu_proof.value_comparison import IDLE, MATMUL, MEAN_POWER, State, compare

from torchperfd_daemon.collectors.gpu_readings import GpuReading
from torchperfd_daemon.collectors.nvml import NvmlCollector

TITLE: Final = "Values of the driver beside nvidia-smi"
SECONDS: Final = 60

_WINDOW_S: Final = 2.0
_SETTLE_S: Final = 3.0  # nvidia-smi's and NVML's power is the mean of one second
_SIZE: Final = 8192
_BATCH: Final = 20
# Operations per clock of a multiprocessor's tensor cores, by compute capability. The data sheet's peak of an
# H100 or H200, 989 TFLOP/s, is this at 1,830 MHz; both may clock higher, and lower under this load.
_BF16_FLOPS_PER_CLOCK: Final = {(9, 0): 4096}
_POWER: Final[Key] = ("gpu_power_watts", ())


def activity_bounds(idle: State, loaded: State) -> list[Bound]:
    """Return what must hold of the GPU's activity in the two states."""
    utilization: Key = ("gpu_utilization_ratio", ())
    both = [values[utilization] for values in (loaded.before, loaded.printed) if utilization in values]
    parts = ("sm", "tensor", "dram")
    quiet = [idle.before[key] for part in parts if (key := (f"gpu_{part}_active_ratio", ())) in idle.before]
    busy = loaded.before.get(("gpu_sm_active_ratio", ()))
    return [
        Bound(
            f"under load, utilization of 90 % or more in both: {_percents(both)}",
            min(both) >= 0.9 if len(both) == 2 else None,
        ),
        Bound(
            f"idle, GPM's SM, tensor and DRAM activity below 2 %: {_percents(quiet)}",
            max(quiet) < 0.02 if quiet else None,
        ),
        Bound(
            f"under load, GPM's SM activity of 90 % or more: {_percents([] if busy is None else [busy])}",
            None if busy is None else busy >= 0.9,
        ),
    ]


def _percents(ratios: Sequence[float]) -> str:
    return ", ".join(f"{100 * ratio:.1f} %" for ratio in ratios) or "not provided"


def tensor_bound(active: float | None, achieved: float | None, peak: float | None) -> Bound:
    """Return whether GPM's tensor activity is the share of the peak that was achieved, both in FLOP/s."""
    text = "tensor activity within 15 % of the achieved share of the peak"
    if active is None or achieved is None or peak is None:
        return Bound(f"{text}: activity, load or peak is not known", None)
    share = achieved / peak
    measured = (
        f"{100 * active:.1f} % beside {achieved / 1e12:.0f} of {peak / 1e12:.0f} TFLOP/s, {100 * share:.1f} %"
    )
    return Bound(f"{text}: {measured}", abs(active - share) <= 0.15 * share)


def achieved_flops(ended: Sequence[float], since: float, until: float) -> float | None:
    """Return FLOP/s of the matmul batches that ended in a window; None with fewer than two."""
    within = [at for at in ended if since <= at <= until]
    if len(within) < 2:
        return None
    return (len(within) - 1) * _BATCH * 2 * _SIZE**3 / (within[-1] - within[0])


def bf16_peak(capability: tuple[int, int], multiprocessors: int, clock_hertz: float) -> float | None:
    """Return the FLOP/s that tensor cores could do at a clock; None for an unknown generation."""
    per_clock = _BF16_FLOPS_PER_CLOCK.get(capability)
    return None if per_clock is None else per_clock * multiprocessors * clock_hertz


@dataclass(frozen=True, slots=True)
class Measured:
    """A state and the window that its means are of.

    Attributes:
        state: The values of both.
        since: When the window began, in monotonic seconds.
        until: When it ended.
        clock_hertz: Mean SM clock in it.
        is_same_gpu: Whether model, driver version and PCI address are those of nvidia-smi.
    """

    state: State
    since: float
    until: float
    clock_hertz: float
    is_same_gpu: bool


def measure(name: str, collector: NvmlCollector) -> Measured:
    """Read the daemon's values around a window, and nvidia-smi's at its end."""
    time.sleep(_SETTLE_S)
    since, baseline = time.monotonic(), _read(collector)
    clocks = []
    while time.monotonic() < since + _WINDOW_S:
        clocks.append(_sm_clock_hertz(baseline.uuid))
        time.sleep(0.05)
    until, before = time.monotonic(), _read(collector)
    printed = nvidia_smi.parse(nvidia_smi.query(), baseline.uuid)
    after = _read(collector)
    state = State(
        name,
        plain_values(before) | rates(baseline, before, until - since),
        plain_values(after),
        # The mean of our energy counter has the same value beside it.
        printed.values | ({(MEAN_POWER, ()): printed.values[_POWER]} if _POWER in printed.values else {}),
    )
    return Measured(state, since, until, fmean(clocks), ("gpu_info", printed.info) in before.values)


def plain_values(reading: GpuReading) -> Values:
    """Return a reading's numbers, with the memory of all processes as one."""
    values = {key: value for key, value in reading.values.items() if key[0] != "gpu_info"}
    return values | {(PROCESS_MEMORY, ()): float(sum(reading.process_bytes.values()))}


def rates(earlier: GpuReading, later: GpuReading, seconds: float) -> Values:
    """Return means of counters between two readings: bytes over PCIe per second, and power from energy."""
    names = {"gpu_pcie_bytes": PCIE_RATE, "gpu_energy_joules": MEAN_POWER}
    return {
        (names[family], labels): (value - earlier.values[family, labels]) / seconds
        for (family, labels), value in later.values.items()
        if family in names and (family, labels) in earlier.values
    }


def _read(collector: NvmlCollector) -> GpuReading:
    return collector.read()[0]


def _sm_clock_hertz(uuid: str) -> float:
    # Past the collector, whose every reading begins GPM's window anew. It has initialised the library.
    handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    return float(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)) * 1e6


@contextmanager
def matmul_load() -> Iterator[list[float]]:
    """Keep the GPU busy within the block; yield the growing list of when batches of matmuls ended."""
    ended: list[float] = []
    stop = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        load = pool.submit(_multiply, stop, ended)
        try:
            while not ended and not load.done():
                time.sleep(0.05)
            yield ended
        finally:
            stop.set()
        load.result()


def _multiply(stop: threading.Event, ended: list[float]) -> None:
    left, right = (torch.randn(_SIZE, _SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(left)
    running: torch.cuda.Event | None = None
    while not stop.is_set():
        for _ in range(_BATCH):
            torch.mm(left, right, out=product)
        launched = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        launched.record()
        if running is not None:
            # One batch is always launched ahead, so that the GPU never waits, and never more than two.
            running.synchronize()
            ended.append(time.monotonic())
        running = launched
    torch.cuda.synchronize()


def run(machine: Machine) -> Outcome:
    """Compare all values in both states."""
    if machine.is_rehearsal:
        return Outcome(notes=["Only a GPU has values of the daemon to put beside those of nvidia-smi."])
    collector = NvmlCollector()
    _read(collector)  # GPM and the counters derived from it have values from the second reading on
    idle = measure(IDLE, collector)
    with matmul_load() as ended:
        loaded = measure(MATMUL, collector)
    outcome = compare([idle.state, loaded.state])
    achieved = achieved_flops(ended, loaded.since, loaded.until)
    properties = torch.cuda.get_device_properties(0)
    peak = bf16_peak(
        (properties.major, properties.minor), properties.multi_processor_count, loaded.clock_hertz
    )
    active = loaded.state.before.get(("gpu_tensor_active_ratio", ()))
    outcome.bounds += [
        *activity_bounds(idle.state, loaded.state),
        tensor_bound(active, achieved, peak),
        Bound(
            "model, driver version and PCI address equal to nvidia-smi's",
            idle.is_same_gpu and loaded.is_same_gpu,
        ),
    ]
    outcome.notes += [
        f"The load is {_SIZE} x {_SIZE} x {_SIZE} matmuls of bfloat16; the SM clock was "
        f"{loaded.clock_hertz / 1e6:.0f} MHz on average.",
        f"Ratios of GPM, PCIe rates and {MEAN_POWER} (from gpu_energy_joules) are means over "
        f"{_WINDOW_S:.0f} s; nvidia-smi's PCIe rates are means over 20 ms and not judged.",
    ]
    return outcome
