"""The node's data for ``top``: its processors, memory and GPUs, from the daemon's readings."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from torchperfd.v1 import control_pb2

_CPU: Final = "node_cpu_utilization_ratio"
_AVAILABLE: Final = "node_memory_available_bytes"
_TOTAL: Final = "node_memory_total_bytes"
_BUSY: Final = "gpu_utilization_ratio"
_USED: Final = "gpu_memory_used_bytes"
_ROOM: Final = "gpu_memory_total_bytes"
_POWER: Final = "gpu_power_watts"
_HEAT: Final = "gpu_temperature_celsius"
_INFO: Final = "gpu_info"

READINGS: Final = (_CPU, _AVAILABLE, _TOTAL, _BUSY, _USED, _ROOM, _POWER, _HEAT, _INFO)
"""The metrics to request."""


@dataclass(frozen=True, slots=True)
class GpuView:
    """One GPU or MIG instance; values that it does not provide are None."""

    gpu: str
    model: str
    busy: float | None
    memory_used: float | None
    memory_total: float | None
    watts: float | None
    celsius: float | None


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node. Ratios are 0 to 1, memory is bytes; what is not known is None."""

    cpu: float | None
    memory_used: float | None
    memory_total: float | None
    gpus: tuple[GpuView, ...]


def node(readings: Iterable[control_pb2.Reading]) -> NodeView:
    """Return a node's values."""
    own: dict[str, float] = {}
    gpus: dict[str, dict[str, float]] = {}
    models: dict[str, str] = {}
    for reading in readings:
        gpu = reading.labels.get("gpu")
        if gpu is None:
            own[reading.name] = reading.value
        elif reading.name == _INFO:
            models[gpu] = reading.labels["model"]
        elif reading.labels.get("sensor", "gpu") == "gpu":
            gpus.setdefault(gpu, {})[reading.name] = reading.value
    total, available = own.get(_TOTAL), own.get(_AVAILABLE)
    return NodeView(
        own.get(_CPU),
        total - available if total is not None and available is not None else None,
        total,
        tuple(
            GpuView(
                gpu,
                models.get(gpu, ""),
                values.get(_BUSY),
                values.get(_USED),
                values.get(_ROOM),
                values.get(_POWER),
                values.get(_HEAT),
            )
            for gpu, values in sorted(gpus.items(), key=lambda item: _order(item[0]))
        ),
    )


def _order(gpu: str) -> list[int]:
    """Return what sorts ``0:2`` behind ``0:1`` and ``10`` behind ``9``."""
    return [int(part) if part.isdigit() else 0 for part in gpu.split(":")]
