"""The node over HTTP: GPUs, processors, memory, pressure, disks, collectors, and the doctor's findings."""

import asyncio
import os
import shutil
import time
from collections.abc import Callable
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from torchperfd._version import __revision__, __version__
from torchperfd_daemon.goodput.tracker import process_of
from torchperfd_daemon.views.node import Values, collector_dicts, gpu_dicts, node_dict, values_of
from torchperfd_daemon.web.access import Access
from torchperfd_daemon.web.endpoint import json_answer, view_dict
from torchperfd_daemon.web.reader import Parts, Reader

_DOCTOR_S: Final = 60.0
_MIN_SPAN_S: Final = 0.9
_LONGEST_SPAN_S: Final = 30.0


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

    async def node(self, request: Request, access: Access) -> Response:
        """The node."""
        now, values = self._clock(), values_of(self._parts.families())
        self._samples = [each for each in self._samples if now - each[0] <= _LONGEST_SPAN_S]
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
        return await json_answer(request, document)

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
