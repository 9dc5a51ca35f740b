"""The metrics that dashboards and alerts may name, each with its labels; the daemon has to export them."""

import re
from collections.abc import Iterator
from typing import Final

_RANK: Final = frozenset({"run", "rank"})
_GPU: Final = frozenset({"gpu", "gpu_uuid"})
_NONE: Final[frozenset[str]] = frozenset()

METRICS: Final[dict[str, frozenset[str]]] = {
    "torchperfd_train_steps_total": _RANK,
    "torchperfd_train_step_seconds_total": _RANK,
    "torchperfd_train_phase_seconds_total": _RANK | {"phase"},
    "torchperfd_train_samples_total": _RANK,
    "torchperfd_train_validate_steps_total": _RANK,
    "torchperfd_train_last_step_timestamp_seconds": _RANK,
    "torchperfd_train_world_size": _RANK,
    "torchperfd_train_state": _RANK | {"state"},
    "torchperfd_train_rank_info": _RANK
    | {
        "job_name",
        "node",
        "local_rank",
        "node_rank",
        "script",
        "torch_version",
        "python_version",
        "slurm_job_id",
        "pod_uid",
    },
    "torchperfd_train_step_duration_seconds": frozenset({"run"}),
    "torchperfd_train_verdict": frozenset({"run", "cause"}),
    "torchperfd_node_cpu_utilization_ratio": _NONE,
    "torchperfd_node_memory_available_bytes": _NONE,
    "torchperfd_node_memory_total_bytes": _NONE,
    "torchperfd_node_network_bytes_total": frozenset({"direction"}),
    "torchperfd_node_disk_bytes_total": frozenset({"direction"}),
    "torchperfd_node_pressure_seconds_total": frozenset({"resource", "kind"}),
    "torchperfd_gpu_info": _GPU | {"model", "driver_version", "pci_bus_id"},
    "torchperfd_gpu_utilization_ratio": _GPU,
    "torchperfd_gpu_memory_used_bytes": _GPU,
    "torchperfd_gpu_memory_total_bytes": _GPU,
    "torchperfd_gpu_power_watts": _GPU,
    "torchperfd_gpu_temperature_celsius": _GPU | {"sensor"},
    "torchperfd_gpu_energy_joules_total": _GPU,
    "torchperfd_capture_requests_total": frozenset({"trigger", "result"}),
    "torchperfd_capture_active": _NONE,
    "torchperfd_capture_bytes_total": _NONE,
    "torchperfd_capture_last_success_timestamp_seconds": _NONE,
    "torchperfd_build_info": frozenset({"version", "python_version"}),
    "torchperfd_clients": _NONE,
    "torchperfd_ingest_events_total": _NONE,
    "torchperfd_ingest_dropped_events_total": frozenset({"where"}),
    "torchperfd_collector_success": frozenset({"collector"}),
    "torchperfd_collector_duration_seconds": frozenset({"collector"}),
    "torchperfd_collector_last_success_timestamp_seconds": frozenset({"collector"}),
}

_SELECTOR: Final = re.compile(r"\b(?P<name>torchperfd_\w+)(?:\{(?P<matchers>[^}]*)\})?")
_MATCHER: Final = re.compile(r'(?P<label>\w+)\s*(?:=~|!~|!=|=)\s*"')
_HISTOGRAM_SUFFIX: Final = re.compile(r"_(bucket|sum|count)$")


def selectors(expr: str) -> Iterator[tuple[str, set[str]]]:
    """Find every metric of ours in a PromQL expression, with the labels it is selected by."""
    for match in _SELECTOR.finditer(expr):
        labels = {matcher["label"] for matcher in _MATCHER.finditer(match["matchers"] or "")}
        name = match["name"]
        yield (name if name in METRICS else _HISTOGRAM_SUFFIX.sub("", name)), labels


def unknown(expr: str) -> set[str]:
    """Name what an expression asks for and no daemon exports: metrics, and labels of metrics."""
    problems = set()
    for name, labels in selectors(expr):
        if name not in METRICS:
            problems.add(name)
        else:
            problems |= {f"{name}{{{label}}}" for label in labels - METRICS[name]}
    return problems
