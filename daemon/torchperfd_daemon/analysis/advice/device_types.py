"""The kinds of accelerators: the name that torch has for each, and which settings exist there."""

import re
from dataclasses import dataclass
from typing import Final

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
_BY_CATEGORY: Final = {
    "hip_runtime": ROCM,
    "hip_driver": ROCM,
    "xpu_runtime": XPU,
    "xpu_driver": XPU,
    "mtia_runtime": MTIA,
    "mtia_driver": MTIA,
    "cuda_runtime": CUDA,
    "cuda_driver": CUDA,
}
# Exporters write the runtimes of several vendors as CUDA's.
_SHARED: Final = frozenset({"cuda_runtime", "cuda_driver", "privateuse1_runtime", "privateuse1_driver"})
_MPS_OPERATOR: Final = re.compile(r"aten::\w*_mps_|(?:aten::)?mps::")


def device_type(trace: Trace, *, on_device: bool) -> DeviceType:
    """Return the kind of device of a trace.

    Args:
        on_device: The trace has device events.
    """
    if not on_device:
        return MPS if any(_MPS_OPERATOR.match(name) for name in trace.names) else CPU
    if trace.of_categories(_SHARED).any():
        calls = {trace.names[at] for at in set(trace.name[trace.of_categories(_SHARED)].tolist())}
        found = next((kind for call, kind in _BY_CALL if any(call.match(name) for name in calls)), None)
        if found is not None:
            return found
    present = {trace.categories[at] for at in set(trace.category.tolist())}
    by_category = next((kind for name, kind in _BY_CATEGORY.items() if name in present), None)
    # Only CUDA's and ROCm's devices have a compute capability in the file's header.
    return by_category or (CUDA if trace.device_generation else UNKNOWN)
