"""How busy the node's CPUs are."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from torchperfd_daemon.collectors.base import Family
from torchperfd_daemon.collectors.procfs import read

_IDLE: Final = slice(3, 5)
"""Idle columns of the CPU line: idle, and idle while waiting for a disk."""

_COUNTED: Final = 8
"""The columns after these, guest time, are part of user time already."""


class CpuCollector:
    """Samples the CPUs' use since the sample before; the first sample has none to show."""

    name = "cpu"

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._stat = proc / "stat"
        self._before: tuple[int, int] | None = None

    def sample(self) -> Sequence[Family]:
        """Return the utilisation.

        Raises:
            OSError: procfs cannot be read.
            ValueError: It is damaged.
        """
        family = Family(
            "node_cpu_utilization_ratio", "Share of all CPUs in use since the last sample.", "gauge"
        )
        now = parse_cpu_ticks(read(self._stat))
        if self._before is not None:
            busy, total = now[0] - self._before[0], now[1] - self._before[1]
            if total > 0:
                # The kernel's idle columns may run backwards a little.
                family.add(min(1.0, max(0.0, busy / total)))
        self._before = now
        return [family]


def parse_cpu_ticks(text: str) -> tuple[int, int]:
    """Return (busy, total) clock ticks of all CPUs since boot, from ``/proc/stat``.

    Raises:
        ValueError: It is damaged.
    """
    name, *columns = text.partition("\n")[0].split()[: _COUNTED + 1] or [""]
    if name != "cpu" or len(columns) < 5:
        raise ValueError(f"{text[:80]!r} is no CPU line")
    ticks = list(map(int, columns))
    total = sum(ticks)
    return total - sum(ticks[_IDLE]), total
