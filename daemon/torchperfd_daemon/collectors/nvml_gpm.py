"""NVML's GPM: activity of a GPU's units between two samples; Hopper and newer."""

import math
from collections.abc import Callable, Iterable
from typing import Any, Final

import pynvml

from torchperfd_daemon.collectors.nvml_call import ask

SM_ACTIVE: Final = 2
SM_OCCUPANCY: Final = 3
TENSOR_ACTIVE: Final = 5
DRAM_ACTIVE: Final = 10
PCIE_TRANSMIT: Final = 20
PCIE_RECEIVE: Final = 21
NVLINK_RECEIVE: Final = 60
NVLINK_TRANSMIT: Final = 61


def is_supported(handle: Any) -> bool:
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
        self._wanted = tuple(metrics)
        self._request: Any = pynvml.c_nvmlGpmMetricsGet_t()
        self._request.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        self._request.numMetrics = len(self._wanted)
        for position, metric in enumerate(self._wanted):
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
        results = (request.metrics[position] for position in range(len(self._wanted)))
        return {
            result.metricId: result.value
            for result in results
            if result.nvmlReturn == pynvml.NVML_SUCCESS and math.isfinite(result.value)
        }
