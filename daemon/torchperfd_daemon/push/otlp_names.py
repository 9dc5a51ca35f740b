"""The names of series over OTLP: those of OpenTelemetry's conventions for hardware, else our own.

A series without a convention keeps the name of its family, without ``_total``. A Prometheus that receives it
makes the name on the metrics page of that and its unit again.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from prometheus_client.core import Metric
from prometheus_client.samples import Sample

from torchperfd_daemon.metrics.exposition import PREFIX


class Instrument(Enum):
    """How the values of a metric add up."""

    GAUGE = "Gauge"
    COUNTER = "Counter"
    UP_DOWN_COUNTER = "UpDownCounter"


@dataclass(frozen=True, slots=True)
class HardwareName:
    """The conventional name of a family of GPUs, whose values it keeps.

    Attributes:
        family: Its name on the metrics page, without the prefix.
        unit: In UCUM.
        constants: Attributes that all of its series have.
        labels: The attribute that each label becomes.
        id_labels: Labels that together are ``hw.id``.
        only: The series that have these labels; others keep the family's name.
        is_status: Whether a series becomes two, of the states ``ok`` and ``failed``.
    """

    family: str
    name: str
    instrument: Instrument
    unit: str
    constants: Mapping[str, str]
    labels: Mapping[str, str] = field(default_factory=lambda: {"gpu": "hw.name"})
    id_labels: tuple[str, ...] = ("gpu_uuid",)
    only: Mapping[str, str] = field(default_factory=dict)
    is_status: bool = False

    def fits(self, sample: Sample) -> bool:
        """Return whether a series has this name."""
        return all(sample.labels.get(label) == value for label, value in self.only.items())

    def attributes(self, sample: Sample) -> dict[str, str]:
        """Return the attributes of a series."""
        # A GPU that was lost before it could be asked has no UUID.
        identity = "/".join(sample.labels[label] or sample.labels["gpu"] for label in self.id_labels)
        named = {attribute: sample.labels[label] for label, attribute in self.labels.items()}
        return {"hw.id": identity, **named, **self.constants}


_GPU: Final = {"hw.type": "gpu"}

HARDWARE_NAMES: Final = (
    HardwareName("gpu_up", "hw.status", Instrument.UP_DOWN_COUNTER, "1", _GPU, is_status=True),
    HardwareName(
        "gpu_utilization_ratio",
        "hw.gpu.utilization",
        Instrument.GAUGE,
        "1",
        {**_GPU, "hw.gpu.task": "general"},
    ),
    HardwareName("gpu_memory_used_bytes", "hw.gpu.memory.usage", Instrument.UP_DOWN_COUNTER, "By", _GPU),
    HardwareName("gpu_memory_total_bytes", "hw.gpu.memory.limit", Instrument.UP_DOWN_COUNTER, "By", _GPU),
    HardwareName("gpu_power_watts", "hw.power", Instrument.GAUGE, "W", _GPU),
    HardwareName("gpu_energy_joules", "hw.energy", Instrument.COUNTER, "J", _GPU),
    HardwareName(
        "gpu_temperature_celsius",
        "hw.temperature",
        Instrument.GAUGE,
        "Cel",
        {"hw.type": "temperature"},
        {"gpu": "hw.name", "gpu_uuid": "hw.parent", "sensor": "hw.sensor_location"},
        ("gpu_uuid", "sensor"),
    ),
    HardwareName(
        "gpu_pcie_bytes",
        "hw.gpu.io",
        Instrument.COUNTER,
        "By",
        _GPU,
        {"gpu": "hw.name", "direction": "network.io.direction"},
    ),
    HardwareName(
        "gpu_ecc_errors",
        "hw.errors",
        Instrument.COUNTER,
        "{error}",
        _GPU,
        {"gpu": "hw.name", "type": "error.type"},
        only={"scope": "volatile"},
    ),
)
"""All families with a conventional name."""

_UNITS: Final = {
    "seconds": "s",
    "bytes": "By",
    "ratio": "1",
    "watts": "W",
    "joules": "J",
    "celsius": "Cel",
    "hertz": "Hz",
}
"""UCUM's unit of each ending of our own names."""


def unit_of(name: str) -> str:
    """Return the unit of one of our own families; empty for what is counted."""
    return _UNITS.get(name.rpartition("_")[2], "")


_BY_FAMILY: Final = {PREFIX + each.family: each for each in HARDWARE_NAMES}


def hardware_name(metric: Metric) -> HardwareName | None:
    """Return the conventional name of a family; None for one that keeps its own."""
    return _BY_FAMILY.get(metric.name)
