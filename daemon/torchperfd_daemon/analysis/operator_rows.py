"""The rows of the operator table."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from torchperfd_daemon.analysis.breakdown import DEVICE
from torchperfd_daemon.analysis.trace import Int64

# Device events are rows of their own too, in torch's table and in this one.
ON_DEVICE: Final = DEVICE | {"gpu_user_annotation"}


@dataclass(frozen=True, slots=True)
class Operator:
    """One row, over all calls of one group. Times in ns, memory in bytes.

    Attributes:
        name: The operator; every ``ProfilerStep#N`` counts as ``ProfilerStep*``.
        category: Kineto's category, such as ``cpu_op``, ``user_annotation`` or ``kernel``.
        self_cpu_ns: Host time outside its children. Negative where children on record outlast it.
        total_cpu_ns: Host time, children included.
        self_device_ns: Time of the kernels, copies and fills it launched itself.
        total_device_ns: The same, children included.
        self_cpu_memory: Host memory allocated less freed while it ran, outside its children.
        total_cpu_memory: The same, children included.
        self_device_memory: As ``self_cpu_memory``, on the device.
        total_device_memory: The same, children included.
        shapes: Its inputs' shapes, in a table by shape; a list of tensors is ``[]``, as in torch.
        stack: The Python frames that called it, innermost first, in a table by stack.
        module: The innermost ``nn.Module`` that called it, in a table by module.
    """

    name: str
    category: str
    calls: int
    self_cpu_ns: int
    total_cpu_ns: int
    self_device_ns: int = 0
    total_device_ns: int = 0
    self_cpu_memory: int = 0
    total_cpu_memory: int = 0
    self_device_memory: int = 0
    total_device_memory: int = 0
    shapes: str = ""
    stack: tuple[str, ...] = ()
    module: str = ""


@dataclass(frozen=True, slots=True)
class OperatorSteps:
    """The operator table by name, taken apart by step; only the steps in which a row was called.

    Attributes:
        categories: Its category, as in `Operator`.
        row: The row of each cell, an index into ``names``.
        calls: How often the row was called in that step.
        self_cpu_ns: Its host time outside its children.
        self_device_ns: Time of the kernels, copies and fills it launched itself, or was.
    """

    names: tuple[str, ...]
    categories: tuple[str, ...]
    row: Int64
    step: Int64
    calls: Int64
    self_cpu_ns: Int64
    self_device_ns: Int64


# Torch's names for the columns that a table can be sorted by, and how large a row is there.
SORT_KEYS: Final[dict[str, Callable[[Operator], float]]] = {
    "self_cpu_time_total": lambda row: row.self_cpu_ns,
    "cpu_time_total": lambda row: row.total_cpu_ns,
    "cpu_time": lambda row: row.total_cpu_ns / row.calls,
    "self_device_time_total": lambda row: row.self_device_ns,
    "device_time_total": lambda row: row.total_device_ns,
    "device_time": lambda row: row.total_device_ns / row.calls,
    "self_cpu_memory_usage": lambda row: row.self_cpu_memory,
    "cpu_memory_usage": lambda row: row.total_cpu_memory,
    "self_device_memory_usage": lambda row: row.self_device_memory,
    "device_memory_usage": lambda row: row.total_device_memory,
    "count": lambda row: row.calls,
}
