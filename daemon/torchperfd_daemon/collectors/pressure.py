"""Pressure stall information: time lost to waiting for a resource."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from torchperfd_daemon.collectors.base import Family, NothingToCollectError
from torchperfd_daemon.collectors.procfs import read

_RESOURCES: Final = ("cpu", "io", "memory")


class PressureCollector:
    """Samples the node's stall times."""

    name = "pressure"

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._pressure = proc / "pressure"

    def sample(self) -> Sequence[Family]:
        """Return stall times by resource and kind.

        Raises:
            NothingToCollectError: The kernel keeps none, or a container hides them.
            ValueError: A file is damaged.
        """
        family = Family(
            "node_pressure_seconds",
            "Time in which some or all tasks waited for a resource (PSI).",
            "counter",
            ("resource", "kind"),
        )
        for resource in _RESOURCES:
            try:
                text = read(self._pressure / resource)
            except OSError:
                continue
            for kind, seconds in parse_pressure(text):
                # A node whose CPUs all wait for a CPU cannot be: the kernel writes a zero there.
                if (resource, kind) != ("cpu", "full"):
                    family.add(seconds, resource, kind)
        if not family.samples:
            raise NothingToCollectError(
                f"nothing readable in {self._pressure}; boot the kernel with psi=1 to have pressure metrics"
            )
        return [family]


def parse_pressure(text: str) -> Iterator[tuple[str, float]]:
    """Yield (``some`` or ``full``, seconds stalled since boot) from a file of ``/proc/pressure``.

    Raises:
        ValueError: It is damaged.
    """
    for line in text.splitlines():
        kind, _, fields = line.partition(" ")
        _, found, total = fields.rpartition("total=")
        if not found:
            raise ValueError(f"{line!r} is no line of pressure")
        yield kind, int(total) / 1e6
