"""NVML's numbered fields: many values of one GPU in a single call."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import pynvml

from torchperfd_daemon.collectors.nvml_call import ask

MEMORY_TEMPERATURE: Final = 82
NVLINK_COUNT: Final = 91
NVLINK_TRANSMIT_KIB: Final = 138
NVLINK_RECEIVE_KIB: Final = 139
PCIE_TRANSMIT_BYTES: Final = 197
PCIE_RECEIVE_BYTES: Final = 198
SW_POWER_CAP_NS: Final = 74
SYNC_BOOST_NS: Final = 76
# Software thermal, hardware thermal, power brake. CUDA 13 moved them and gave their old numbers to power
# smoothing, so the unit does not follow from the number: see `slowdown_ns`.
_SLOWDOWNS_NS: Final = ((251, 252, 253), (269, 270, 271))

_ALL_LINKS: Final = 0xFFFFFFFF
_ASKED: Final = (
    *(MEMORY_TEMPERATURE, NVLINK_COUNT, PCIE_TRANSMIT_BYTES, PCIE_RECEIVE_BYTES),
    *(SW_POWER_CAP_NS, SYNC_BOOST_NS, *_SLOWDOWNS_NS[0], *_SLOWDOWNS_NS[1]),
    *((NVLINK_TRANSMIT_KIB, _ALL_LINKS), (NVLINK_RECEIVE_KIB, _ALL_LINKS)),
)
# The binding's structures run Python code for every attribute, to turn bytes into text. Numbers are read
# past that.
_number_of = pynvml.c_nvmlFieldValue_t.fieldId.__get__
_status_of = pynvml.c_nvmlFieldValue_t.nvmlReturn.__get__
_type_of = pynvml.c_nvmlFieldValue_t.valueType.__get__
_value_of = pynvml.c_nvmlFieldValue_t.value.__get__
_MEMBERS: Final = {
    pynvml.NVML_VALUE_TYPE_DOUBLE: ("dVal", 0),
    pynvml.NVML_VALUE_TYPE_UNSIGNED_INT: ("uiVal", 32),
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG: ("ulVal", 64),
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: ("ullVal", 64),
    pynvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: ("sllVal", 63),
}


@dataclass(frozen=True, slots=True)
class FieldValue:
    """One field.

    Attributes:
        value: In the field's own unit.
        bits: Width after which a counter starts again at zero; 0 for floating point.
    """

    value: float
    bits: int


def read_fields(handle: Any) -> dict[int, FieldValue]:
    """Return the fields that this GPU has, by number.

    Raises:
        GpuLostError: The GPU does not answer.
        DriverGoneError: The driver does not.
    """
    found = {}
    for item in ask("nvmlDeviceGetFieldValues", handle, _ASKED) or ():
        if _status_of(item) == pynvml.NVML_SUCCESS and (kind := _MEMBERS.get(_type_of(item))):
            member, bits = kind
            found[_number_of(item)] = FieldValue(getattr(_value_of(item), member), bits)
    return found


def slowdown_ns(fields: Mapping[int, FieldValue]) -> tuple[float, float, float] | None:
    """Return the time under software thermal, hardware thermal and power brake slowdown.

    Nanoseconds since the driver was loaded; None unless exactly one of the two numberings can be
    meant, which is when its three fields are 64-bit counters and those of the other are not.
    """
    candidates = [
        [fields[number].value for number in numbers]
        for numbers in _SLOWDOWNS_NS
        if all(number in fields and fields[number].bits == 64 for number in numbers)
    ]
    if len(candidates) != 1:
        return None
    software, hardware, brake = candidates[0]
    return software, hardware, brake
