"""The node over HTTP: GPUs, processors, memory, pressure, disks, collectors, and the doctor's findings."""

import asyncio
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from starlette.requests import Request

from torchperfd._version import __revision__, __version__
from torchperfd_daemon.collectors.base import Family, Sampler
from torchperfd_daemon.goodput.tracker import process_of
from torchperfd_daemon.views.model import gpu_order
from torchperfd_daemon.web.access import Access, Parts, Reader
from torchperfd_daemon.web.endpoint import view_dict

_BUSY: Final = "node_disk_busy_seconds"
_DISK: Final = "node_disk_bytes"
_NETWORK: Final = "node_network_bytes"
_PRESSURE: Final = "node_pressure_seconds"
_CPU: Final = "node_cpu_utilization_ratio"
_AVAILABLE: Final = "node_memory_available_bytes"
_TOTAL: Final = "node_memory_total_bytes"
_GPU: Final = {
    "gpu_utilization_ratio": "utilization_ratio",
    "gpu_sm_active_ratio": "sm_active_ratio",
    "gpu_tensor_active_ratio": "tensor_active_ratio",
    "gpu_memory_used_bytes": "memory_used_bytes",
    "gpu_memory_total_bytes": "memory_total_bytes",
    "gpu_power_watts": "power_watts",
    "gpu_temperature_celsius": "temperature_celsius",
}

Values = Mapping[tuple[str, tuple[str, ...]], float]
"""Newest values by family and labels."""


def values_of(families: Iterable[Family]) -> dict[tuple[str, tuple[str, ...]], float]:
    """Return the values of families; those of GPUs without the labels ``gpu_uuid`` and beyond."""
    return {(family.name, labels): value for family in families for labels, value in family.samples}


def node_dict(now: Values, before: Values, seconds: float) -> dict[str, Any]:
    """Return processors, memory, pressure, disks and network; what is not known is None.

    Args:
        before: The values of so many seconds ago, for rates; empty without any.
    """

    def rate(name: str, *labels: str) -> float | None:
        key = name, labels
        if key not in now or key not in before or seconds <= 0:
            return None
        return max(0.0, (now[key] - before[key]) / seconds)

    total, available = now.get((_TOTAL, ())), now.get((_AVAILABLE, ()))
    pressure = [labels for name, labels in now if name == _PRESSURE]
    return {
        "cpu": {"utilization_ratio": now.get((_CPU, ()))},
        "memory": {
            "used_bytes": None if total is None or available is None else total - available,
            "total_bytes": total,
        },
        "pressure": [
            {"resource": resource, "kind": kind, "ratio": rate(_PRESSURE, resource, kind)}
            for resource, kind in pressure
        ],
        "disks": {
            "read_bytes_per_second": rate(_DISK, "read"),
            "written_bytes_per_second": rate(_DISK, "write"),
            "busy_ratio": rate(_BUSY),
        },
        "network": {
            "received_bytes_per_second": rate(_NETWORK, "receive"),
            "sent_bytes_per_second": rate(_NETWORK, "transmit"),
        },
    }


def gpu_dicts(now: Values, runs: Mapping[str, Iterable[str]]) -> list[dict[str, Any]]:
    """Return the GPUs, by index.

    Args:
        runs: The runs that use a GPU, by its index.
    """
    gpus: dict[str, dict[str, Any]] = {}
    for (name, labels), value in now.items():
        if not name.startswith("gpu_") or not labels:
            continue
        gpu = gpus.setdefault(labels[0], {"gpu": labels[0], "model": None, **dict.fromkeys(_GPU.values())})
        if name == "gpu_info":
            gpu["model"] = labels[2]
        elif name in _GPU and labels[2:] in ((), ("gpu",)):
            gpu[_GPU[name]] = value
        elif name == "gpu_up":
            gpu["answers"] = bool(value)
    for index, gpu in gpus.items():
        gpu["runs"] = sorted(runs.get(index, ()))
    return [gpus[index] for index in sorted(gpus, key=gpu_order)]


def collector_dicts(samplers: Iterable[Sampler]) -> list[dict[str, Any]]:
    """Return how each collector is doing that has something to collect."""
    return [
        {
            "collector": sampler.name,
            "healthy": sampler.success,
            "duration_seconds": sampler.duration_seconds,
            "last_success_unix_seconds": sampler.last_success_unix_seconds or None,
        }
        for sampler in samplers
        if not sampler.has_nothing
    ]


_DOCTOR_S: Final = 60.0
_MIN_SPAN_S: Final = 0.9
_MAX_SPAN_S: Final = 30.0


class NodeApi:
    """Answers about this node.

    Rates are of the time between two requests, at least a second; the first answer has none.
    """

    def __init__(self, parts: Parts, reader: Reader, clock: Callable[[], float] = time.monotonic) -> None:
        self._parts = parts
        self._reader = reader
        self._clock = clock
        self._samples: list[tuple[float, Values]] = []
        self._examined: tuple[float, dict[str, Any]] | None = None
        self._examining: asyncio.Task[None] | None = None

    async def node(self, request: Request, access: Access) -> dict[str, Any]:
        now, values = self._clock(), values_of(self._parts.families())
        self._samples = [each for each in self._samples if now - each[0] <= _MAX_SPAN_S]
        before = next((each for each in reversed(self._samples) if now - each[0] >= _MIN_SPAN_S), None)
        if not self._samples or now - self._samples[-1][0] >= _MIN_SPAN_S:
            self._samples.append((now, values))
        span = now - before[0] if before is not None else 0.0
        listed = await self._reader.runs(access)
        users: dict[str, set[str]] = {}
        for run, ranks in self._parts.store.runs().items():
            for rank in ranks:
                if rank.connected:
                    users.setdefault(self._parts.gpu_of(rank.identity), set()).add(run)
        document = {
            "schema": "torchperfd.node/1",
            "node": self._parts.node,
            "version": __version__,
            "revision": __revision__ or None,
            **node_dict(values, before[1] if before is not None else {}, span),
            "gpus": gpu_dicts(values, users),
            "collectors": collector_dicts(self._parts.samplers),
            "captures_disk": self._disk(),
            "doctor": self._doctor() if access is Access.OWNER else None,
            "view": view_dict(
                self._parts.node,
                access,
                [status for run in listed.runs for status in run.ranks],
                window_seconds=span or None,
            ),
        }
        document["cpu"]["count"] = os.cpu_count()
        return document

    def _disk(self) -> dict[str, int] | None:
        place = self._parts.catalog.directory
        while not place.exists() and place != place.parent:
            place = place.parent
        try:
            usage = shutil.disk_usage(place)
        except OSError:
            return None
        return {"free_bytes": usage.free, "total_bytes": usage.total}

    def _doctor(self) -> dict[str, Any] | None:
        """Return the newest findings, and look again in the background where they are old."""
        old = self._examined is None or self._clock() - self._examined[0] > _DOCTOR_S
        if old and (self._examining is None or self._examining.done()):
            self._examining = asyncio.create_task(self._examine())
        return None if self._examined is None else self._examined[1]

    async def _examine(self) -> None:
        # Imported for this alone: most daemons are never asked.
        from torchperfd_daemon import doctor

        ranks = {
            process_of(rank): doctor.ReportedFacts(rank.totals.loader, rank.totals.threads)
            for rank in self._parts.store.ranks()
            if rank.connected and rank.is_process_known and not rank.identity.is_simulated
        }
        facts = await asyncio.to_thread(doctor.read_facts, ranks)
        self._examined = self._clock(), doctor.to_dict(doctor.examine(facts), facts.skipped)
