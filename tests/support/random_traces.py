"""Traces made at random: training and inference, devices, captures, lost kernels, overheads, cold starts."""

import random
from dataclasses import dataclass, field
from typing import Any, Final

from tests.unit.daemon import traces

US: Final = 1_000
MS: Final = 1_000_000

_VENDORS: Final = {
    "cuda": ("cuda_runtime", "cudaLaunchKernel", "cudaStreamSynchronize"),
    "rocm": ("cuda_runtime", "hipLaunchKernel", "hipStreamSynchronize"),
    "xpu": ("xpu_runtime", "urEnqueueKernelLaunch", "urQueueFinish"),
    "mtia": ("mtia_runtime", "mtiaLaunchKernel", "mtiaStreamSynchronize"),
    "": ("", "", ""),
}
_OPERATORS: Final = ("aten::mm", "aten::mul", "aten::conv2d", "aten::addmm", "aten::copy_", "aten::slice")
_OPTIMIZERS: Final = ("Adam", "AdamW", "SGD", "Adagrad", "NAdam", "LBFGS", "Muon", "NorMuon", "FusedAdam")
_COLLECTIVES: Final = ("allreduce", "_reduce_scatter_base", "_allgather_base", "all_to_all", "broadcast")
_DTYPES: Final = ("Float", "BFloat16", "Half", "Long", "")
_WRAPPERS: Final = ("DistributedDataParallel.forward", "FSDP::all_gather (layer)", "DataParallel.forward", "")
_OVERHEADS: Final = (
    "Activity Buffer Request",
    "Buffer Flush",
    "Command Buffer Full",
    "Lazy Function Loading",
)
_FRAMES: Final = (
    "train.py(12): train_step",
    "threading.py(1002): _bootstrap",
    "torch/profiler/profiler.py(700): step",
    "torchperfd/hooks/phases.py(10): enter",
    "site-packages/diffusers/pipeline.py(5): call",
)


@dataclass(slots=True)
class _Writer:
    """One host thread and one stream, and the events so far."""

    chance: random.Random
    vendor: str
    now: int = 0
    device: int = 0
    number: int = 0
    events: list[str] = field(default_factory=list)
    dtype: str = "float"
    kernels: tuple[str, ...] = ("sgemm", "elementwise")

    def host(self, name: str, start: int, end: int, cat: str = "cpu_op", args: Any = None) -> None:
        self.events.append(traces.event(name, start, end, cat=cat, args=args))

    def run(self, name: str, *, lost: float, slowed: float, kernel: str = "", args: Any = None) -> None:
        """Call an operator that launches a kernel, unless there is no device."""
        chance, start = self.chance, self.now
        length = chance.choice((5, 20, 60, 300)) * US
        if chance.random() < slowed:
            length += chance.choice((1, 20, 200)) * MS
            overhead = chance.choice((*_OVERHEADS, ""))
            if overhead:
                self.host(overhead, start + US, start + length - US, "overhead")
        dims = chance.choice(([[64, 64], [64, 64]], [[8]]))
        inputs = {"Input Dims": dims, "Input type": [self.dtype] * 2}
        self.host(name, start, start + length, args=inputs)
        category, launch, _ = _VENDORS[self.vendor]
        if category:
            self.number += 1
            linked = {"correlation": self.number}
            self.host(launch, start + US, start + length - US, category, linked)
            if chance.random() >= lost:
                begin = max(self.device, start + length)
                self.device = begin + chance.choice((3, 30, 200)) * US
                self.events.append(
                    traces.event(
                        kernel or chance.choice(self.kernels),
                        begin,
                        self.device,
                        cat="kernel",
                        thread=7,
                        args={**linked, "device": 0, "stream": 7, **(args or {})},
                    )
                )
        self.now = start + length + chance.choice((1, 4, 40)) * US

    def wait(self) -> None:
        """Wait for the device."""
        category, _, call = _VENDORS[self.vendor]
        end = max(self.now + US, self.device) + self.chance.choice((0, 500)) * US
        self.host("aten::item", self.now, end)
        if category:
            self.host(call, self.now, end, category)
        self.now = end + US


def random_trace(seed: int) -> tuple[list[str], dict[str, Any]]:
    """Return the events of a trace, and the facts of its header; equal seeds give equal traces."""
    chance = random.Random(seed)
    writer = _Writer(chance, chance.choice(tuple(_VENDORS)))
    writer.dtype = chance.choice(("float", "float", "double", "c10::BFloat16", "c10::Half"))
    if chance.random() < 0.2:
        writer.kernels = ("triton_poi_fused_0", "Cijk_gemm")
    lost, slowed = chance.choice((0.0, 0.0, 0.0, 0.05, 0.5, 1.0)), chance.choice((0.0, 0.0, 0.0, 0.02, 0.3))
    trains, wrapper = chance.random() < 0.6, chance.choice(_WRAPPERS)
    optimizer = chance.choice(_OPTIMIZERS)
    captures, steps = chance.random() < 0.15, chance.choice((0, 1, 3, 5))
    cold = chance.random() < 0.2
    if cold:
        writer.host("aten::mm", 0, chance.choice((5, 500)) * MS)
        writer.now = 500 * MS
    for number in range(max(steps, 1)):
        _step(writer, number, lost, slowed, trains, wrapper, optimizer, captures, marked=steps > 0)
    facts: dict[str, Any] = {}
    if chance.random() < 0.5:
        facts["deviceProperties"] = [
            {"name": "a device", "totalGlobalMem": 80 << 30, "computeMajor": chance.choice((0, 7, 9))}
        ]
    if chance.random() < 0.4:
        facts["distributedInfo"] = {"rank": chance.randrange(4), "world_size": 4}
    if chance.random() < 0.2:
        facts["torchperfd"] = {"unrecorded_step_ns": chance.choice((100 * US, 5 * MS, 500 * MS))}
    return writer.events, facts


def _step(
    writer: _Writer,
    number: int,
    lost: float,
    slowed: float,
    trains: bool,
    wrapper: str,
    optimizer: str,
    captures: bool,
    *,
    marked: bool,
) -> None:
    chance, begin = writer.chance, writer.now
    category = _VENDORS[writer.vendor][0]
    if chance.random() < 0.3:
        loader = chance.choice(("_SingleProcessDataLoaderIter", "_MultiProcessingDataLoaderIter"))
        until = writer.now + chance.choice((1, 8)) * MS
        writer.host(f"enumerate(DataLoader)#{loader}.__next__", writer.now, until, "user_annotation")
        writer.now = until
    if wrapper:
        writer.host(wrapper, writer.now, writer.now + 50 * US, "user_annotation")
    if captures and category:
        writer.host("cudaStreamBeginCapture", writer.now, writer.now + US, category)
    for _ in range(chance.randrange(1, 12)):
        frame = chance.choice(_FRAMES)
        start = writer.now
        writer.run(chance.choice(_OPERATORS), lost=1.0 if captures else lost, slowed=slowed)
        writer.host(frame, start, writer.now, "python_function")
    if captures and category:
        writer.host("cudaStreamEndCapture", writer.now, writer.now + US, category)
    if chance.random() < 0.4:
        kind, dtype = chance.choice(_COLLECTIVES), chance.choice(_DTYPES)
        described = {"Collective name": kind, "dtype": dtype, "Process Group Name": "default_pg"}
        writer.run("record_param_comms", lost=lost, slowed=0, kernel="ncclDevKernel_Generic", args=described)
    if trains:
        for _ in range(chance.randrange(1, 6)):
            writer.run("MmBackward0", lost=lost, slowed=slowed)
        start = writer.now
        for _ in range(chance.choice((1, 40))):
            writer.run("aten::mul_", lost=lost, slowed=0)
        writer.host(f"Optimizer.step#{optimizer}.step", start, writer.now, "user_annotation")
    if chance.random() < 0.4:
        writer.wait()
    writer.now += chance.choice((0, 10, 3000)) * US
    if marked:
        writer.host(f"ProfilerStep#{number}", begin, writer.now, "user_annotation")
