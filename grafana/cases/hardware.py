"""Scenarios of GPUs and nodes."""

from collections.abc import Mapping
from typing import Final

from grafana.alerting import Case, Firing

_AT: Final = {"job": "torchperfd", "instance": "node-a:9407"}
_GPU: Final = {**_AT, "gpu": "0", "gpu_uuid": "GPU-0"}


def _series(name: str, labels: Mapping[str, str]) -> str:
    matchers = ",".join(f'{key}="{value}"' for key, value in labels.items())
    return f"torchperfd_{name}{{{matchers}}}"


def _gpu(name: str, **more: str) -> str:
    return _series(f"gpu_{name}", {**_GPU, **more})


_OWNER: Final = {"allocator": "slurm", "allocation": "77"}
_THERMAL: Final = {"reason": "hw_thermal_slowdown"}

_USE: Final = (
    Case(
        "TorchperfdGpuIdle",
        "an allocated GPU without work, then with work",
        {_gpu("allocation_info", **_OWNER): "1x100", _gpu("utilization_ratio"): "0.01x60 0.9x40"},
        {"20m": (), "50m": (Firing({**_GPU, **_OWNER}, "1%"),), "80m": ()},
    ),
    # The second one pauses for less than a quarter of an hour again and again.
    Case(
        "TorchperfdGpuIdle",
        "an idle GPU without an owner, and one that works at times",
        {
            _gpu("utilization_ratio"): "0x100",
            _series("gpu_allocation_info", {**_AT, "gpu": "1", "gpu_uuid": "GPU-1", **_OWNER}): "1x100",
            _series("gpu_utilization_ratio", {**_AT, "gpu": "1", "gpu_uuid": "GPU-1"}): "0x9 0.9 " * 10,
        },
        {"50m": (), "95m": ()},
    ),
    Case(
        "TorchperfdGpuThrottled",
        "a GPU that overheats, then cools down",
        {_gpu("throttle_seconds_total", **_THERMAL): "0+15x30 450x30"},
        {"5m": (), "20m": (Firing({**_GPU, **_THERMAL}, "25%"),), "50m": ()},
    ),
    Case(
        "TorchperfdGpuThrottled",
        "a GPU at its power cap",
        {
            _gpu("throttle_seconds_total", reason="sw_power_cap"): "0+30x60",
            _gpu("throttle_seconds_total", **_THERMAL): "0x60",
        },
        {"50m": ()},
    ),
    Case(
        "TorchperfdGpuMemoryNearlyFull",
        "a GPU with 99 % of its memory in use",
        {_gpu("memory_used_bytes"): "99x30 50x30", _gpu("memory_total_bytes"): "100x60"},
        {"5m": (), "15m": (Firing(_GPU, "99%"),), "45m": ()},
    ),
    Case(
        "TorchperfdGpuMemoryNearlyFull",
        "a GPU with 90 % of its memory in use",
        {_gpu("memory_used_bytes"): "90x30", _gpu("memory_total_bytes"): "100x30"},
        {"25m": ()},
    ),
    Case(
        "TorchperfdNodeMemoryNearlyFull",
        "a node with 2 % of its memory left, then with half",
        {
            _series("node_memory_available_bytes", _AT): "2x20 50x20",
            _series("node_memory_total_bytes", _AT): "100x40",
        },
        {"3m": (), "10m": (Firing(_AT, "2%"),), "30m": ()},
    ),
    Case(
        "TorchperfdNodeMemoryNearlyFull",
        "a node with a tenth of its memory left",
        {
            _series("node_memory_available_bytes", _AT): "10x20",
            _series("node_memory_total_bytes", _AT): "100x20",
        },
        {"15m": ()},
    ),
)

_HEALTH: Final = (
    Case(
        "TorchperfdGpuLost",
        "a GPU that leaves the bus, and comes back",
        {_gpu("up"): "1x5 0x10 1x10"},
        {"4m": (), "10m": (Firing(_GPU),), "20m": ()},
    ),
    Case("TorchperfdGpuLost", "a GPU that answers", {_gpu("up"): "1x20"}, {"15m": ()}),
    # The timestamp is that of minute 5 and stays.
    Case(
        "TorchperfdGpuXid",
        "an XID of the hardware",
        {_gpu("xid_last_timestamp_seconds", xid="79"): "_x5 300x30"},
        {"4m": (), "8m": (Firing({**_GPU, "xid": "79"}, "3m 0s"),), "20m": ()},
    ),
    Case(
        "TorchperfdGpuXid",
        "an XID of the script's kernels",
        {_gpu("xid_last_timestamp_seconds", xid="31"): "_x5 300x30"},
        {"8m": ()},
    ),
    Case(
        "TorchperfdGpuEccErrors",
        "uncorrected errors",
        {_gpu("ecc_errors_total", type="uncorrected", scope="volatile"): "0x10 2x90"},
        {"9m": (), "15m": (Firing(_GPU),), "90m": ()},
    ),
    Case(
        "TorchperfdGpuEccErrors",
        "corrected errors, and old errors of the GPU's life",
        {
            _gpu("ecc_errors_total", type="corrected", scope="volatile"): "0+1x30",
            _gpu("ecc_errors_total", type="uncorrected", scope="aggregate"): "0+1x30",
            _gpu("ecc_errors_total", type="uncorrected", scope="volatile"): "3x30",
        },
        {"20m": ()},
    ),
    Case(
        "TorchperfdGpuRowRemap",
        "a remapping that is pending until a reset",
        {_gpu("row_remap_pending"): "0x5 1x20 0x10", _gpu("row_remap_failure"): "0x35"},
        {"4m": (), "15m": (Firing(_GPU),), "30m": ()},
    ),
    Case(
        "TorchperfdGpuRowRemap",
        "a remapping that has failed",
        {_gpu("row_remap_pending"): "0x20", _gpu("row_remap_failure"): "1x20"},
        {"10m": (Firing(_GPU),)},
    ),
    Case(
        "TorchperfdGpuRowRemap",
        "no remapping",
        {_gpu("row_remap_pending"): "0x20", _gpu("row_remap_failure"): "0x20"},
        {"10m": ()},
    ),
)

HARDWARE: Final = (*_USE, *_HEALTH)
