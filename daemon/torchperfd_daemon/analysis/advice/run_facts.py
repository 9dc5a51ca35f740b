"""What a trace shows of the run: accelerator, training or inference, wrappers, compiled code, CUDA graphs."""

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal

from torchperfd_daemon.analysis.categories import OPERATOR
from torchperfd_daemon.analysis.trace import Trace


@dataclass(frozen=True, slots=True)
class DeviceType:
    """One kind of device.

    Attributes:
        name: The type of its ``torch.device``; empty if the file does not show it.
        backend: The backend of ``torch.distributed`` that moves its tensors; empty if none is known.
        has_graphs: ``torch.compile(mode="reduce-overhead")`` launches graphs there.
        is_compiled_for: ``torch.compile`` makes kernels for it.
        grows_segments: Its allocator has ``expandable_segments``.
    """

    name: str = ""
    backend: str = ""
    has_graphs: bool = False
    is_compiled_for: bool = False
    grows_segments: bool = False

    @property
    def quoted(self) -> str:
        """The type as an argument of torch's functions: a literal, or the expression that has it."""
        return f'"{self.name}"' if self.name else "device.type"


CPU: Final = DeviceType("cpu", "gloo", is_compiled_for=True)
CUDA: Final = DeviceType("cuda", "nccl", has_graphs=True, is_compiled_for=True, grows_segments=True)
# torch calls AMD's devices cuda as well.
ROCM: Final = DeviceType("cuda", "nccl", has_graphs=True, is_compiled_for=True)
XPU: Final = DeviceType("xpu", "xccl", is_compiled_for=True)
MTIA: Final = DeviceType("mtia")
MPS: Final = DeviceType("mps")
NPU: Final = DeviceType("npu", "hccl")
UNKNOWN: Final = DeviceType()

# By the names of runtime calls; of several kinds in one file the first that occurs decides.
_BY_CALL: Final = (
    (re.compile(r"hip[A-Z]|roc[a-z]*[A-Z_]"), ROCM),
    (re.compile(r"cu(?:da)?[A-Z]"), CUDA),
    (re.compile(r"ur[A-Z]|ze[A-Z]|sycl"), XPU),
    (re.compile(r"acl(?:rt|nn|op)|AscendCL|aten::npu"), NPU),
)
_BY_VENDOR: Final = {"hip": ROCM, "xpu": XPU, "mtia": MTIA, "cuda": CUDA}
# Exporters write the runtimes of several vendors as CUDA's.
_SHARED: Final = frozenset({"cuda_runtime", "cuda_driver", "privateuse1_runtime", "privateuse1_driver"})
_MPS_OPERATOR: Final = re.compile(r"aten::\w*_mps_|(?:aten::)?mps::")


def device_type(trace: Trace, *, on_device: bool) -> DeviceType:
    """Return the kind of device of a trace."""
    if not on_device:
        return MPS if any(_MPS_OPERATOR.match(name) for name in trace.names) else CPU
    if trace.of_categories(_SHARED).any():
        calls = {trace.names[at] for at in set(trace.name[trace.of_categories(_SHARED)].tolist())}
        found = next((kind for call, kind in _BY_CALL if any(call.match(name) for name in calls)), None)
        if found is not None:
            return found
    for vendor, kind in _BY_VENDOR.items():
        if trace.of_categories({f"{vendor}_runtime", f"{vendor}_driver"}).any():
            return kind
    # Only CUDA's and ROCm's devices have a compute capability in the file's header.
    return CUDA if trace.device_generation else UNKNOWN


Wrapper = Literal["DDP", "FSDP1", "FSDP2", "ZeRO", "DeepSpeed"]

_TRAINS: Final = re.compile(
    r"autograd::engine::|\w*Backward\d*$|Optimizer\.(?:step|zero_grad)#|.*\.py\(\d+\): backward$"
    r"|\W*backward\W*$|DistributedDataParallel\.backward"
)
_WRAPPERS: Final[dict[Wrapper, re.Pattern[str]]] = {
    "DDP": re.compile(
        r"DistributedDataParallel\.|torch::distributed::reducer::|torch\.distributed\.ddp\.reducer::"
        r"|nn\.Module: DistributedDataParallel"
    ),
    "FSDP1": re.compile(r"FullyShardedDataParallel\.|nn\.Module: FullyShardedDataParallel"),
    "FSDP2": re.compile(r"FSDP::|fsdp::|nn\.Module: FSDP[A-Z]"),
    "ZeRO": re.compile(r"Optimizer\.step#ZeroRedundancyOptimizer\."),
    "DeepSpeed": re.compile(
        r"Optimizer\.step#DeepSpeedZero|nn\.Module: DeepSpeedEngine|(?:.*/)?deepspeed/runtime/zero/"
    ),
}
_COMPILED: Final = re.compile(
    r"Torch-Compiled Region|## Call CompiledFxGraph|triton__0d"
    r"|(?:autograd::engine::evaluate_function: )?CompiledFunction"
    r"|triton_(?:poi|red|per|tem|for|unk|mm|spl|mix)_"
)
_GRAPH_LAUNCH: Final = re.compile(r"(?:cuda|cu|hip)GraphLaunch")


class RunFacts:
    """The facts of one run that advice depends on."""

    def __init__(self, trace: Trace, *, on_device: bool) -> None:
        self._trace = trace
        self._on_device = on_device

    @cached_property
    def trains(self) -> bool:
        """Whether a backward pass or an optimizer is in the file; otherwise the run is inference."""
        return bool(self._trace.backward.any()) or self._has(_TRAINS)

    @cached_property
    def wrappers(self) -> frozenset[Wrapper]:
        """The wrappers of distributed training that the file shows."""
        return frozenset(wrapper for wrapper, names in _WRAPPERS.items() if self._has(names))

    @cached_property
    def is_compiled(self) -> bool:
        return self._has(_COMPILED)

    @cached_property
    def launches_graphs(self) -> bool:
        return self._has(_GRAPH_LAUNCH)

    @cached_property
    def has_operators(self) -> bool:
        return bool(self._trace.of_categories({OPERATOR}).any())

    @cached_property
    def device_type(self) -> DeviceType:
        return device_type(self._trace, on_device=self._on_device)

    def _has(self, names: re.Pattern[str]) -> bool:
        return any(names.match(name) for name in self._trace.names)
