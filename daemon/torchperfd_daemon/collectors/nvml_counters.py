"""What NVML counts of one GPU: numbered fields, activity by GPM, throttled time, and totals of them."""

import ctypes
import functools
import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import pynvml

from torchperfd_daemon.collectors.nvml_errors import ask, attempt


class RateTotal:
    """The integral of a rate.

    Attributes:
        total: The integral, in the rate's unit times seconds.
    """

    def __init__(self) -> None:
        self.total = 0.0

    def add(self, rate: float, seconds: float) -> None:
        self.total += rate * seconds


class WrappingTotal:
    """A counter of a few bits, continued past its end. Two wraps between samples look like one."""

    def __init__(self) -> None:
        self.total = 0.0
        self._last: float | None = None

    def update(self, count: float, bits: int) -> None:
        """Take a reading of a counter that wraps after ``bits`` bits."""
        if self._last is not None:
            self.total += (count - self._last) % 2**bits
        self._last = count


class ActiveTime:
    """How long each of several states was on, from samples of the states that are on.

    A state that is on at both ends of an interval counts as on throughout, one that is on at one
    end for half of it. That is as good as the sampling rate allows.

    Attributes:
        seconds: Time on since the first sample, by name.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.seconds = dict.fromkeys(names, 0.0)
        self._last: tuple[float, frozenset[str]] | None = None

    def update(self, now: float, on: frozenset[str]) -> None:
        """Add a sample at ``now``, in monotonic seconds."""
        if self._last is not None:
            then, before = self._last
            for name in self.seconds:
                self.seconds[name] += (now - then) * ((name in before) + (name in on)) / 2
        self._last = now, on

    def pause(self) -> None:
        """Count nothing between the last sample and the next, because the states are unknown."""
        self._last = None


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
_OF_THE_GPU: Final = (
    *(MEMORY_TEMPERATURE, NVLINK_COUNT, PCIE_TRANSMIT_BYTES, PCIE_RECEIVE_BYTES),
    *(SW_POWER_CAP_NS, SYNC_BOOST_NS, *_SLOWDOWNS_NS[0], *_SLOWDOWNS_NS[1]),
)
# Number and scope.
_ASKED_FIELDS: Final = (
    *((number, 0) for number in _OF_THE_GPU),
    *((NVLINK_TRANSMIT_KIB, _ALL_LINKS), (NVLINK_RECEIVE_KIB, _ALL_LINKS)),
)
# The binding's structures run Python code for every attribute, to turn bytes into text, and its function for
# fields makes new ones for each call. So structures are kept, and numbers are read past them.
# A field: number, scope, time, latency, type, status, value. A metric: number, status, value, texts.
_FIELD: Final = struct.Struct("IIqqII8s")
_METRIC: Final = "IId24x"
_FORMATS: Final = {
    pynvml.NVML_VALUE_TYPE_DOUBLE: (struct.Struct("d"), 0),
    pynvml.NVML_VALUE_TYPE_UNSIGNED_INT: (struct.Struct("I"), 32),
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG: (struct.Struct("L"), 64),
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: (struct.Struct("Q"), 64),
    pynvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: (struct.Struct("q"), 63),
}


class FieldValue(NamedTuple):
    """One field.

    Attributes:
        value: In the field's own unit.
        bits: Width after which a counter starts again at zero; 0 for floating point.
    """

    value: float
    bits: int


class Fields:
    """Reads the fields of one GPU: at first all, later those that it had in the reading before."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self.ask_for_all()

    def ask_for_all(self) -> None:
        """Ask for every field with the next reading."""
        self._set_asked(_ASKED_FIELDS)

    def read(self) -> dict[int, FieldValue]:
        """Return the fields that this GPU has, by number.

        Raises:
            GpuLostError: The GPU does not answer.
            DriverGoneError: The driver does not.
        """
        if attempt(self._fill) is None:
            return {}
        found = {}
        for number, _, _, _, kind, status, raw in _FIELD.iter_unpack(self._items):
            if status == pynvml.NVML_SUCCESS and kind in _FORMATS:
                form, bits = _FORMATS[kind]
                found[number] = FieldValue(form.unpack_from(raw)[0], bits)
        if len(found) < len(self._asked):
            self._set_asked([each for each in self._asked if each[0] in found])
        return found

    def _set_asked(self, fields: Sequence[tuple[int, int]]) -> None:
        self._asked = fields
        self._items = (pynvml.c_nvmlFieldValue_t * len(fields))(*fields)

    def _fill(self) -> bool:
        call = getattr(pynvml.nvmlLib, "nvmlDeviceGetFieldValues", None)
        if call is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        status = call(self._handle, len(self._asked), ctypes.byref(self._items))
        if status != pynvml.NVML_SUCCESS:
            raise pynvml.NVMLError(status)
        return True


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


GPM_SM_ACTIVE: Final = 2
GPM_SM_OCCUPANCY: Final = 3
GPM_TENSOR_ACTIVE: Final = 5
GPM_DRAM_ACTIVE: Final = 10
GPM_PCIE_TRANSMIT: Final = 20
GPM_PCIE_RECEIVE: Final = 21
GPM_NVLINK_RECEIVE: Final = 60
GPM_NVLINK_TRANSMIT: Final = 61


def is_gpm_supported(handle: Any) -> bool:
    """Return whether a GPU has GPM."""
    support = ask("nvmlGpmQueryDeviceSupport", handle)
    return support is not None and bool(support.isSupportedDevice)


class Gpm:
    """Takes samples and reads metrics between each and the one before it.

    Args:
        take: Fills a sample; None when it could not.
        clock: Monotonic seconds.
    """

    def __init__(
        self, take: Callable[[Any], Any], metrics: Iterable[int], clock: Callable[[], float]
    ) -> None:
        self._take = take
        self._clock = clock
        wanted = tuple(metrics)
        self._results = struct.Struct(_METRIC * len(wanted))
        self._request: Any = pynvml.c_nvmlGpmMetricsGet_t()
        self._request.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        self._request.numMetrics = len(wanted)
        for position, metric in enumerate(wanted):
            self._request.metrics[position].metricId = metric
        self._previous: Any = ask("nvmlGpmSampleAlloc")
        self._newest: Any = ask("nvmlGpmSampleAlloc")
        self._taken_at: float | None = None

    def read(self) -> tuple[dict[int, float], float]:
        """Take a sample.

        Returns:
            Percentages and MiB per second by metric, and the seconds that they are the mean of. No
            metrics with the first sample, and none when sampling failed.

        Raises:
            GpuLostError: The GPU does not answer.
            DriverGoneError: The driver does not.
        """
        if self._previous is None or self._newest is None:
            return {}, 0.0
        self._previous, self._newest = self._newest, self._previous
        before, self._taken_at = self._taken_at, None
        now = self._clock()
        if self._take(self._newest) is None:
            return {}, 0.0
        self._taken_at = now
        if before is None:
            return {}, 0.0
        return self._between(), now - before

    def close(self) -> None:
        """Free the samples."""
        for sample in (self._previous, self._newest):
            if sample is not None:
                ask("nvmlGpmSampleFree", sample)
        self._previous = self._newest = None

    def _between(self) -> dict[int, float]:
        request = self._request
        request.sample1, request.sample2 = self._previous, self._newest
        if ask("nvmlGpmMetricsGet", request) is None:
            return {}
        found = iter(self._results.unpack_from(request, pynvml.c_nvmlGpmMetricsGet_t.metrics.offset))
        return {
            metric: value
            for metric, status, value in zip(found, found, found, strict=True)
            if status == pynvml.NVML_SUCCESS and math.isfinite(value)
        }


# The names that nvidia-smi prints. Idle clocks are not throttled, so that bit is left out.
_THROTTLE_REASONS: Final = {
    "applications_clocks_setting": 0x2,
    "sw_power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sync_boost": 0x10,
    "sw_thermal_slowdown": 0x20,
    "hw_thermal_slowdown": 0x40,
    "hw_power_brake_slowdown": 0x80,
    "display_clock_setting": 0x100,
}


class Throttle:
    """Seconds for which clocks were throttled, by reason.

    Read from the driver's own counters where it has them; for the other reasons from the active
    reasons at each sample. The first reading chooses between the two, since a counter that changes
    its source would jump.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, handle: Any, clock: Callable[[], float]) -> None:
        self._handle = handle
        self._clock = clock
        self._watched: ActiveTime | None = None

    def read(self, fields: Mapping[int, FieldValue]) -> dict[str, float]:
        """Return seconds since the driver was loaded, or since the first reading for those watched.

        Raises:
            GpuLostError: The GPU does not answer.
            DriverGoneError: The driver does not.
        """
        counted = _counted_throttle_seconds(fields)
        if self._watched is None:
            supported = _active_reasons("nvmlDeviceGetSupportedClocksEventReasons", self._handle)
            self._watched = ActiveTime((supported or _THROTTLE_REASONS.keys()) - counted.keys())
        active = _active_reasons("nvmlDeviceGetCurrentClocksEventReasons", self._handle)
        if active is None:
            self._watched.pause()
            return counted
        self._watched.update(self._clock(), active)
        return self._watched.seconds | {
            reason: seconds for reason, seconds in counted.items() if reason not in self._watched.seconds
        }

    def pause(self) -> None:
        """Count nothing until the next reading."""
        if self._watched is not None:
            self._watched.pause()


def _counted_throttle_seconds(fields: Mapping[int, FieldValue]) -> dict[str, float]:
    counted = {}
    for reason, number in (
        ("sw_power_cap", SW_POWER_CAP_NS),
        ("sync_boost", SYNC_BOOST_NS),
    ):
        if number in fields:
            counted[reason] = fields[number].value / 1e9
    slowdowns = slowdown_ns(fields)
    if slowdowns is not None:
        names = ("sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown")
        counted.update(zip(names, (ns / 1e9 for ns in slowdowns), strict=True))
    return counted


def _active_reasons(function: str, handle: Any) -> frozenset[str] | None:
    bits = ask(function, handle)
    if bits is None:
        # Drivers before 535 know it by its old name.
        bits = ask(function.replace("Event", "Throttle"), handle)
    return None if bits is None else _reasons(bits)


@functools.cache
def _reasons(bits: int) -> frozenset[str]:
    return frozenset(name for name, bit in _THROTTLE_REASONS.items() if bits & bit)
