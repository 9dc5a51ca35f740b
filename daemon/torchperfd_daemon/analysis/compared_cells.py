"""The values of one trace that a comparison uses: the tables' rows over its steps, sparse."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from torchperfd_daemon.analysis.breakdown import DEVICE
from torchperfd_daemon.analysis.operator_rows import ON_DEVICE
from torchperfd_daemon.analysis.summary import Summary
from torchperfd_daemon.analysis.trace import Int64

_PARTS: Final = ("busy", "compute", "comm", "memcpy", "exposed_comm", "exposed_memcpy", "idle")
_KINDS_OF_MEMORY: Final = ("host_allocated", "host_peak", "device_allocated", "device_peak")


@dataclass(frozen=True, slots=True)
class Cells:
    """The values of rows in the steps of one trace, sparse; ``calls`` is None for rows without calls."""

    names: Sequence[str]
    row: Int64
    step: Int64
    value: Int64
    calls: Int64 | None


def durations(summary: Summary) -> Cells:
    """Return the duration of each step in ns; of the whole recording where there are no steps."""
    return _dense({"step": [step.duration_ns for step in summary.steps] or [summary.duration_ns]})


def phases(summary: Summary) -> Cells:
    """Return the host time of each phase in each step."""
    names = sorted({name for step in summary.step_phases for name in step})
    return _dense({name: [step.get(name, 0) for step in summary.step_phases] for name in names})


def device_parts(summary: Summary) -> Cells:
    """Return the parts of each step's device time; no rows without a device."""
    if not summary.breakdown.n_gpu_events:
        return _dense({})
    steps = summary.step_breakdowns or (summary.breakdown,)
    return _dense({part: [getattr(step, f"{part}_ns") for step in steps] for part in _PARTS})


def memory(summary: Summary) -> Cells:
    """Return each step's memory in bytes."""
    memory = summary.samples and summary.samples.memory
    return _dense({kind: getattr(memory, kind) for kind in _KINDS_OF_MEMORY})


def _dense(rows: dict[str, Any]) -> Cells:
    values = np.array([list(row) for row in rows.values()], dtype=np.int64)
    row, step = np.indices(values.shape) if rows else (values, values)
    return Cells(tuple(rows), row.ravel(), step.ravel(), values.ravel(), None)


def operators(summary: Summary) -> Cells:
    """Return the self CPU time of each operator in each step."""
    return _called(summary, lambda category: category not in ON_DEVICE, "self_cpu_ns")


def launched(summary: Summary) -> Cells:
    """Return the device time that each operator launched in each step."""
    return _called(summary, lambda category: category not in ON_DEVICE, "self_device_ns")


def kernels(summary: Summary) -> Cells:
    """Return the device time of each kernel, copy and fill in each step."""
    return _called(summary, lambda category: category in DEVICE, "self_device_ns")


def _called(summary: Summary, wanted: Callable[[str], bool], column: str) -> Cells:
    assert summary.samples is not None
    table = summary.samples.operators
    chosen = np.array([wanted(category) for category in table.categories], dtype=np.bool_)[table.row]
    values: Int64 = getattr(table, column)[chosen]
    return Cells(table.names, table.row[chosen], table.step[chosen], values, table.calls[chosen])
