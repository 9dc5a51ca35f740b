"""A fake NVML: a real shared library, built by gcc, that the real binding loads.

A scenario is a text; one line is one fact::

    driver 580.95.05          version; `driver_error 9` makes every call fail so
    gpu                       begins a GPU; the lines that follow are about it
    power_mw 350500           a fact; what is not there is "not supported"
    energy_mj !999            an error in the place of a value
    field.82 u32:64           a numbered field: its type and value; `field.138.all` is over all links
    gpm.2 87.5                a GPM metric
    process 4242 1073741824   pid and bytes, and the MIG instance if it is on one
    xid 79                    an event; the list of events may only grow
    lost                      fallen off the bus
    delay_ms 20               how long each call takes
    hang nvmlDeviceGetName    a call that does not return before the line is gone
    mig 0                     begins instance 0 of the GPU above
"""

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).parent
GIB: Final = 1024**3

# Symbols that drivers of 2021 (470) do not have.
MISSING_IN_OLD_DRIVERS: Final = (
    "nvmlDeviceGetMemoryInfo_v2",
    "nvmlDeviceGetTemperatureV",
    "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetSupportedClocksEventReasons",
    "nvmlDeviceGetCurrentClocksEventReasons",
    "nvmlGpmQueryDeviceSupport",
    "nvmlGpmSampleAlloc",
    "nvmlGpmSampleFree",
    "nvmlGpmSampleGet",
    "nvmlGpmMigSampleGet",
    "nvmlGpmMetricsGet",
)

# A busy H100 in a machine of eight: every fact that the collector asks for.
H100: Final[Mapping[str, object]] = {
    "name": "NVIDIA H100 80GB HBM3",
    "utilization_percent": 97,
    "memory_total_bytes": 80 * GIB,
    "memory_used_bytes": 60 * GIB,
    "memory_reserved_bytes": GIB // 2,
    "power_mw": 650_500,
    "energy_mj": 12_345_678,
    "temperature_celsius": 61,
    "graphics_mhz": 1980,
    "sm_mhz": 1965,
    "memory_mhz": 2619,
    "video_mhz": 1545,
    "reasons_supported": 0x1FF,
    "reasons": 0,
    "ecc_corrected_volatile": 1,
    "ecc_corrected_aggregate": 2,
    "ecc_uncorrected_volatile": 3,
    "ecc_uncorrected_aggregate": 4,
    "remapped": "1 2 0 0",
    "mig_mode": 0,
    "event_types": 0x9F,
    "gpm": 1,
    "gpm.2": 87.5,
    "gpm.3": 42.25,
    "gpm.5": 31.5,
    "gpm.10": 55,
    "gpm.20": 100,
    "gpm.21": 250,
    "gpm.60": 1000,
    "gpm.61": 2000,
    "field.74": "ull:1500000000",
    "field.76": "ull:0",
    "field.251": "ull:250000000",
    "field.252": "ull:125000000",
    "field.253": "ull:0",
    "field.82": "u32:72",
    "field.91": "u32:18",
    "field.138.all": "ull:1000",
    "field.139.all": "ull:3000",
}

H100_METRICS: Final[Mapping[str, Mapping[tuple[str, ...], float]]] = {
    "gpu_up": {(): 1},
    "gpu_utilization_ratio": {(): 0.97},
    "gpu_sm_active_ratio": {(): 0.875},
    "gpu_sm_occupancy_ratio": {(): 0.4225},
    "gpu_tensor_active_ratio": {(): 0.315},
    "gpu_dram_active_ratio": {(): 0.55},
    "gpu_memory_used_bytes": {(): 60 * GIB},
    "gpu_memory_total_bytes": {(): 80 * GIB},
    "gpu_temperature_celsius": {("gpu",): 61, ("memory",): 72},
    "gpu_clock_hertz": {("graphics",): 1.98e9, ("sm",): 1.965e9, ("memory",): 2.619e9, ("video",): 1.545e9},
    "gpu_row_remap_pending": {(): 0},
    "gpu_row_remap_failure": {(): 0},
}
"""Metrics of such a GPU that the collector and the metrics page name alike."""


@functools.cache
def build(without: tuple[str, ...] = ()) -> Path:
    """Build the library, once per process; return the directory it is in.

    Args:
        without: Symbols that this driver is too old to have.
    """
    directory = tempfile.TemporaryDirectory(prefix="tpd-nvml-")
    _kept.append(directory)
    path = Path(directory.name)
    hidden = "".join(f" {symbol};" for symbol in without)
    (path / "symbols.map").write_text(f"{{ global: nvml*; local:{hidden} *; }};\n")
    subprocess.run(
        [
            *("gcc", "-shared", "-fPIC", "-O1", "-pthread", "-Wall", "-Wextra", "-Werror"),
            *("-Wl,-soname,libnvidia-ml.so.1", f"-Wl,--version-script={path / 'symbols.map'}"),
            *("-o", str(path / "libnvidia-ml.so.1"), str(HERE / "nvml.c")),
        ],
        check=True,
    )
    return path


_kept: Final[list[tempfile.TemporaryDirectory[str]]] = []


def block(head: str, facts: Mapping[str, object], *lines: str) -> str:
    """Return the lines of one GPU or instance; facts that are None are left out."""
    values = (f"{key} {value}" for key, value in facts.items() if value is not None)
    return "\n".join((head, *values, *lines)) + "\n"


def gpu(index: int, *lines: str, **changes: object) -> str:
    """Return the lines of an H100 with some facts changed, or left out when they are None."""
    own = {"uuid": f"GPU-{index:08d}", "pci_bus_id": f"00000000:{index + 1:02X}:00.0"}
    return block("gpu", {**own, **H100, **changes}, *lines)


def scenario(*gpus: str, driver: str = "580.95.05") -> str:
    """Return the text of a scenario."""
    return f"driver {driver}\n" + "".join(gpus)


class Driver:
    """A driver on one node: the library to load, and the scenario it follows now.

    Args:
        directory: Where the scenario is kept.
        text: The first scenario.
        without: Symbols that the library lacks.
    """

    def __init__(self, directory: Path, text: str, without: Iterable[str] = ()) -> None:
        self._path = directory / "nvml.scenario"
        self.env = {
            "LD_LIBRARY_PATH": str(build(tuple(without))),
            "FAKE_NVML_SCENARIO": str(self._path),
        }
        self.follow(text)

    def follow(self, text: str) -> None:
        """Make another scenario true, all of it at once."""
        new = self._path.with_suffix(".new")
        new.write_text(text)
        new.replace(self._path)


Values = dict[tuple[str, ...], float]


def sample(directory: Path, *texts: str, without: Iterable[str] = ()) -> list[dict[str, Values]]:
    """Sample each scenario with the real collector and binding, one second apart on its clocks.

    Returns:
        For each, values by family and label values. An unavailable collector gives
        ``{"unavailable: why": {}}``.
    """
    driver = Driver(directory, texts[0], without)
    paths = []
    for number, text in enumerate(texts):
        path = directory / f"{number}.scenario"
        path.write_text(text)
        paths.append(str(path))
    done = subprocess.run(
        [sys.executable, str(HERE / "probe.py"), *paths],
        env={**os.environ, **driver.env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [
        {
            name: {tuple(labels): value for labels, value in samples}
            for name, samples in json.loads(line).items()
        }
        for line in done.stdout.splitlines()
    ]
