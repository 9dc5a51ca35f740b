"""A node's newest values as the live page shows them, out of the collectors' families."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from torchperfd_daemon.collectors.base import Family, Sampler

_BUSY: Final = "node_disk_busy_seconds"
_DISK: Final = "node_disk_bytes"
_NETWORK: Final = "node_network_bytes"
_PRESSURE: Final = "node_pressure_seconds"
_CPU: Final = "node_cpu_utilization_ratio"
_AVAILABLE: Final = "node_memory_available_bytes"
_TOTAL: Final = "node_memory_total_bytes"
_GPU: Final = {
    "gpu_utilization_ratio": "utilization_ratio",
    "gpu_sm_active_ratio": "sm_active_ratio",
    "gpu_tensor_active_ratio": "tensor_active_ratio",
    "gpu_memory_used_bytes": "memory_used_bytes",
    "gpu_memory_total_bytes": "memory_total_bytes",
    "gpu_power_watts": "power_watts",
    "gpu_temperature_celsius": "temperature_celsius",
}

Values = Mapping[tuple[str, tuple[str, ...]], float]
"""Newest values by family and labels."""


def values_of(families: Iterable[Family]) -> dict[tuple[str, tuple[str, ...]], float]:
    """Return the values of families; those of GPUs without the labels ``gpu_uuid`` and beyond."""
    return {(family.name, labels): value for family in families for labels, value in family.samples}


def node_dict(now: Values, before: Values, seconds: float) -> dict[str, Any]:
    """Return processors, memory, pressure, disks and network; what is not known is None.

    Args:
        before: The values of so many seconds ago, for rates; empty without any.
    """

    def rate(name: str, *labels: str) -> float | None:
        key = name, labels
        if key not in now or key not in before or seconds <= 0:
            return None
        return max(0.0, (now[key] - before[key]) / seconds)

    total, available = now.get((_TOTAL, ())), now.get((_AVAILABLE, ()))
    pressure = [labels for name, labels in now if name == _PRESSURE]
    return {
        "cpu": {"utilization_ratio": now.get((_CPU, ()))},
        "memory": {
            "used_bytes": None if total is None or available is None else total - available,
            "total_bytes": total,
        },
        "pressure": [
            {"resource": resource, "kind": kind, "ratio": rate(_PRESSURE, resource, kind)}
            for resource, kind in pressure
        ],
        "disks": {
            "read_bytes_per_second": rate(_DISK, "read"),
            "written_bytes_per_second": rate(_DISK, "write"),
            "busy_ratio": rate(_BUSY),
        },
        "network": {
            "received_bytes_per_second": rate(_NETWORK, "receive"),
            "sent_bytes_per_second": rate(_NETWORK, "transmit"),
        },
    }


def gpu_dicts(now: Values, runs: Mapping[str, Iterable[str]]) -> list[dict[str, Any]]:
    """Return the GPUs, by index.

    Args:
        runs: The runs that use a GPU, by its index.
    """
    gpus: dict[str, dict[str, Any]] = {}
    for (name, labels), value in now.items():
        if not name.startswith("gpu_") or not labels:
            continue
        gpu = gpus.setdefault(labels[0], {"gpu": labels[0], "model": None, **dict.fromkeys(_GPU.values())})
        if name == "gpu_info":
            gpu["model"] = labels[2]
        elif name in _GPU and labels[2:] in ((), ("gpu",)):
            gpu[_GPU[name]] = value
        elif name == "gpu_up":
            gpu["answers"] = bool(value)
    for index, gpu in gpus.items():
        gpu["runs"] = sorted(runs.get(index, ()))
    return [gpus[index] for index in sorted(gpus, key=_order)]


def collector_dicts(samplers: Iterable[Sampler]) -> list[dict[str, Any]]:
    """Return how each collector is doing that has something to collect."""
    return [
        {
            "collector": sampler.name,
            "healthy": sampler.success,
            "duration_seconds": sampler.duration_seconds,
            "last_success_unix_seconds": sampler.last_success_unix_seconds or None,
        }
        for sampler in samplers
        if not sampler.has_nothing
    ]


def _order(gpu: str) -> list[int]:
    """Return what sorts ``0:2`` behind ``0:1`` and ``10`` behind ``9``."""
    return [int(part) if part.isdigit() else 0 for part in gpu.split(":")]
