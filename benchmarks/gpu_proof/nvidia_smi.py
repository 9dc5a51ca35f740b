"""What ``nvidia-smi -q -x`` prints of one GPU, in base units and under the daemon's names."""

import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final
from xml.etree import ElementTree

Key = tuple[str, tuple[str, ...]]
"""A family and its labels beyond the GPU's, as in the daemon's readings."""
Values = dict[Key, float]

PCIE_RATE: Final = "pcie_bytes_per_second"
PROCESS_MEMORY: Final = "process_memory_bytes"

_QUERY_TIMEOUT_S: Final = 30
_UNITS: Final = {
    **{"": 1.0, "%": 0.01, "C": 1.0, "W": 1.0, "MHz": 1e6, "MiB": 1024.0**2, "KB/s": 1e3},
    **{"us": 1e-6, "ns": 1e-9},
}
_SWITCHES: Final = {"Yes": 1.0, "No": 0.0}
_COUNTERS: Final = "clocks_event_reasons_counters"
_THROTTLE: Final = {
    "sw_power_cap": "sw_power_cap",
    "sync_boost": "sync_boost",
    "sw_thermal_slowdown": "sw_therm_slowdown",
    "hw_thermal_slowdown": "hw_therm_slowdown",
    "hw_power_brake_slowdown": "hw_power_brake",
}
# Of several paths the first that holds a number counts: old drivers have other names. Average power comes
# first, since the daemon's NVML call returns the average on Ampere and newer.
_PATHS: Final[dict[Key, tuple[str, ...]]] = {
    ("gpu_memory_used_bytes", ()): ("fb_memory_usage/used",),
    ("gpu_memory_total_bytes", ()): ("fb_memory_usage/total",),
    ("gpu_power_watts", ()): (
        "gpu_power_readings/average_power_draw",
        "gpu_power_readings/power_draw",
        "gpu_power_readings/instant_power_draw",
        "power_readings/power_draw",
    ),
    ("gpu_temperature_celsius", ("gpu",)): ("temperature/gpu_temp",),
    ("gpu_temperature_celsius", ("memory",)): ("temperature/memory_temp",),
    ("gpu_clock_hertz", ("graphics",)): ("clocks/graphics_clock",),
    ("gpu_clock_hertz", ("sm",)): ("clocks/sm_clock",),
    ("gpu_clock_hertz", ("memory",)): ("clocks/mem_clock",),
    ("gpu_clock_hertz", ("video",)): ("clocks/video_clock",),
    ("gpu_utilization_ratio", ()): ("utilization/gpu_util",),
    ("gpu_row_remap_pending", ()): ("remapped_rows/remapped_row_pending",),
    ("gpu_row_remap_failure", ()): ("remapped_rows/remapped_row_failure",),
    (PCIE_RATE, ("transmit",)): ("pci/tx_util",),
    (PCIE_RATE, ("receive",)): ("pci/rx_util",),
    **{
        ("gpu_throttle_seconds", (reason,)): (f"{_COUNTERS}/{_COUNTERS}_{name}",)
        for reason, name in _THROTTLE.items()
    },
}


@dataclass(frozen=True, slots=True)
class Printed:
    """One GPU as nvidia-smi prints it.

    Attributes:
        info: Model, driver version and PCI address, the labels of ``gpu_info``.
        values: In base units, by the daemon's family and labels.
    """

    info: tuple[str, str, str]
    values: Values


def query() -> str:
    """Return the output of ``nvidia-smi -q -x``.

    Raises:
        OSError: It is not installed.
        subprocess.SubprocessError: It fails, or takes too long.
    """
    command = ["nvidia-smi", "-q", "-x"]
    return subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=_QUERY_TIMEOUT_S
    ).stdout


def parse(document: str, uuid: str) -> Printed:
    """Return the values of the GPU with that UUID. Values printed as ``N/A`` are absent.

    Raises:
        LookupError: It is not in the document.
    """
    log = ElementTree.fromstring(document)
    gpu = next((gpu for gpu in log.iter("gpu") if gpu.findtext("uuid") == uuid), None)
    if gpu is None:
        raise LookupError(f"nvidia-smi does not list GPU {uuid}")
    values = {key: _first_number(gpu, paths) for key, paths in _PATHS.items()}
    values |= {
        ("gpu_ecc_errors", (kind, scope)): _ecc_sum(gpu, kind, scope)
        for kind in ("corrected", "uncorrected")
        for scope in ("volatile", "aggregate")
    }
    values[PROCESS_MEMORY, ()] = _process_memory(gpu)
    return Printed(
        (
            gpu.findtext("product_name", ""),
            log.findtext("driver_version", ""),
            gpu.findtext("pci/pci_bus_id", ""),
        ),
        {key: value for key, value in values.items() if value is not None},
    )


def number(text: str | None) -> float | None:
    """Return a printed value in base units, such as 345e6 for ``345 MHz``; None where it is no number."""
    if text is None:
        return None
    text = text.strip()
    if text in _SWITCHES:
        return _SWITCHES[text]
    amount, _, unit = text.partition(" ")
    try:
        return float(amount) * _UNITS[unit]
    except (ValueError, KeyError):
        return None


def _first_number(gpu: ElementTree.Element, paths: Iterable[str]) -> float | None:
    found = (number(gpu.findtext(path)) for path in paths)
    return next((value for value in found if value is not None), None)


def _ecc_sum(gpu: ElementTree.Element, kind: str, scope: str) -> float | None:
    # NVML sums all places of a kind; nvidia-smi prints them apart, as `sram_correctable`,
    # `sram_uncorrectable_parity` and so on.
    prefixes = tuple(f"{place}_{kind.removesuffix('ed')}able" for place in ("sram", "dram"))
    counts = [
        count
        for item in gpu.iterfind(f"ecc_errors/{scope}/*")
        if item.tag.startswith(prefixes) and (count := number(item.text)) is not None
    ]
    return sum(counts) if counts else None


def _process_memory(gpu: ElementTree.Element) -> float:
    # Type C computes, C+G does both; the daemon counts no process that only draws.
    sizes = (
        number(process.findtext("used_memory"))
        for process in gpu.iterfind("processes/process_info")
        if "C" in process.findtext("type", "")
    )
    return sum(size for size in sizes if size is not None)
