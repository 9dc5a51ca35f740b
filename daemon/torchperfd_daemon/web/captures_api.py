"""Captures over HTTP: the list, each one with its progress, its analysis as a page, and its files.

Pages of captures, and of two compared, are made by a command with ``--html`` in a process at idle priority.
"""

import asyncio
import contextlib
import json
import logging
import os
import re
import shutil
import subprocess
import tempfile
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from torchperfd.model.own_commands import own_file_command
from torchperfd.v1 import control_pb2
from torchperfd_daemon.captures import folder, low_priority
from torchperfd_daemon.captures.analysis_child import AnalysisChild, ChildFiles, child_files
from torchperfd_daemon.captures.catalog import Catalog
from torchperfd_daemon.captures.index import Query
from torchperfd_daemon.captures.manifest import CaptureRecord
from torchperfd_daemon.errors import NoSuchTargetError, TorchperfdError, UsageError
from torchperfd_daemon.views.documents import listed_dict
from torchperfd_daemon.views.model import whole_name
from torchperfd_daemon.web.access import Access, Links, Parts
from torchperfd_daemon.web.endpoint import body_of, json_answer, number, view_dict
from torchperfd_daemon.web.guard import error_response

log = logging.getLogger("torchperfd.http")

TIMEOUT_S: Final = 600.0
MAX_KEPT: Final = 8

_PAGE: Final = "page.html"
_MAX_PAGE_BYTES: Final = 256 * 2**20
_MAX_WAITING: Final = 4
_MAX_REASON: Final = 300


PageCaptures = tuple[str, ...]
"""The id of a capture, or those of two that are compared: before, after."""


def command_for(files: ChildFiles, page: str) -> list[str]:
    """Return the command that analyses a capture, or compares two, and writes the page."""
    name = "analyze" if len(files.folders) == 1 else "compare"
    arguments = (name, "--html", page, "--workers", "1", *files.folders)
    return own_file_command(low_priority.__file__, *files.arguments(), *arguments)


@dataclass(slots=True)
class Report:
    """A page that is being made, or was: with a reason it has failed."""

    page: Path
    task: "asyncio.Task[None]"
    reason: str = ""

    @property
    def state(self) -> str:
        """``making``, ``ready`` or ``failed``."""
        if not self.task.done():
            return "making"
        return "failed" if self.reason else "ready"


class Reports:
    """Makes pages one at a time, and keeps the newest in a private directory until the daemon stops."""

    def __init__(
        self, catalog: Catalog, command: Callable[[ChildFiles, str], list[str]] = command_for
    ) -> None:
        self._catalog = catalog
        self._command = command
        self._directory: Path | None = None
        self._reports: OrderedDict[PageCaptures, Report] = OrderedDict()
        self._one_at_a_time = asyncio.Lock()

    def request(self, *captures: str) -> Report:
        """Return the page of a capture or of two compared; it is begun if there is none or if it has failed.

        Raises:
            NoSuchTargetError: There is no such capture, or a trace of it is gone.
            UsageError: A capture is compared with itself.
            TorchperfdError: It has not ended, has no trace, or too many pages are being made.
        """
        if len(set(captures)) < len(captures):
            raise UsageError("a capture cannot be compared with itself", "choose two")
        known = self._reports.get(captures)
        if known is not None and known.state != "failed":
            self._reports.move_to_end(captures)
            return known
        for each in captures:
            self._check(each)
        if sum(report.state == "making" for report in self._reports.values()) >= _MAX_WAITING:
            raise TorchperfdError("too many pages are being made", "wait for one of them")
        if self._directory is None:
            self._directory = Path(tempfile.mkdtemp(prefix="torchperfd-pages-"))
        page = self._directory / f"{'-'.join(captures)}.html"
        self._reports[captures] = Report(page, asyncio.create_task(self._make(captures, page)))
        self._forget_oldest()
        return self._reports[captures]

    def find(self, *captures: str) -> Report | None:
        """Return a page that was requested."""
        return self._reports.get(captures)

    async def close(self) -> None:
        """Stop, and delete the pages."""
        tasks = [report.task for report in self._reports.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _check(self, capture_id: str) -> None:
        record = self._catalog.get(capture_id)
        if not record.state.ended:
            raise TorchperfdError(f"capture {capture_id} is in progress", "wait for its end")
        files = [trace.file for trace in record.ranks if trace.file]
        if not files:
            raise TorchperfdError(f"capture {capture_id} has no trace", "see the reasons of its ranks")
        for name in files:
            # Any user may have put something else in its place, such as a pipe that never ends.
            self._catalog.open_own(capture_id, name).close()

    async def _make(self, captures: PageCaptures, page: Path) -> None:
        reason, child = "", AnalysisChild(TIMEOUT_S)
        try:
            async with self._one_at_a_time:
                with child_files(self._catalog, captures) as files:
                    command = self._command(files, _PAGE)
                    try:
                        await asyncio.to_thread(child.run, command, files, subprocess.DEVNULL)
                    finally:
                        child.stop()
                    await asyncio.to_thread(_take, files.directory, page)
        except (OSError, TorchperfdError) as error:
            reason = str(error)[:_MAX_REASON]
            log.warning("capture %s has no page: %s", " and ".join(captures), reason)
        report = self._reports.get(captures)
        if report is not None:
            report.reason = reason

    def _forget_oldest(self) -> None:
        done = [captures for captures, report in self._reports.items() if report.state != "making"]
        for captures in done[: max(0, len(self._reports) - MAX_KEPT)]:
            self._reports.pop(captures).page.unlink(missing_ok=True)


def _take(directory: Path, page: Path) -> None:
    """Copy the page that a child has made in its directory, where anything may be, such as a pipe."""
    with (
        contextlib.suppress(OSError),
        folder.opened(directory) as held,
        open(folder.open_file(held, _PAGE), "rb") as source,  # noqa: PTH123
        page.open("wb") as copy,
    ):
        if os.fstat(source.fileno()).st_size <= _MAX_PAGE_BYTES:
            copy.write(source.read(_MAX_PAGE_BYTES))
            return
    raise TorchperfdError("the analyser wrote no page")


MAX_LISTED: Final = 1000

_REPORT_POLICY: Final = (
    "sandbox allow-scripts allow-downloads; default-src 'none'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Of a report, whose own policy allows its one script by its hash; its origin is none, so it has no token."""
_PUBLIC: Final = (
    *("capture_id", "run", "trigger", "requested_at", "state", "step_range", "job_name", "world_size"),
    *("ended_at", "schema"),
)
_PUBLIC_OF_RANK: Final = ("rank", "state", "node", "steps_made", "bytes", "pause_seconds")
_FILE_NAME: Final = re.compile(r"[^A-Za-z0-9._-]")


class _LinkBody(msgspec.Struct, forbid_unknown_fields=True):
    file: str


@dataclass(frozen=True, slots=True)
class Target:
    """What a link leads to: a file of a capture, or a page of one or two captures where the file is empty."""

    captures: PageCaptures
    file: str = ""


def capture_dict(record: CaptureRecord, access: Access, more: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a capture as a caller may see it.

    A stranger sees that there is one, of which ranks and how far it is, as with the metrics.
    """
    whole: dict[str, Any] = {**msgspec.to_builtins(record), **(more or {})}
    if access is Access.OWNER:
        return whole
    ranks = [{key: rank[key] for key in _PUBLIC_OF_RANK} for rank in whole["ranks"]]
    return {**{key: whole[key] for key in _PUBLIC}, "ranks": ranks}


class CapturesApi:
    """Answers about captures."""

    def __init__(self, parts: Parts, reports: Reports) -> None:
        self._parts = parts
        self._reports = reports
        self._links: Links[Target] = Links()

    async def captures(self, request: Request, access: Access) -> dict[str, Any]:
        """The newest captures."""
        query = Query(
            run=request.query_params.get("run", ""), limit=number(request, "limit", 100, 1, MAX_LISTED, int)
        )
        catalog = self._parts.catalog
        listing, rows = await asyncio.to_thread(self._list, query, access)
        return {
            "schema": "torchperfd.captures/1",
            "directory": str(catalog.directory) if access is Access.OWNER else None,
            "total": listing,
            "captures": rows,
            "view": view_dict(self._parts.node, access),
        }

    async def capture(self, request: Request, access: Access) -> dict[str, Any]:
        capture_id = await self._id(request)
        document = await asyncio.to_thread(self._one, capture_id, access)
        return {**document, "view": view_dict(self._parts.node, access)}

    async def analysis(self, request: Request, access: Access) -> Response:
        """The daemon's analysis of a capture."""
        capture_id = await self._id(request)
        content = await asyncio.to_thread(self._parts.catalog.analysis, capture_id)
        try:
            # Other users may write there.
            json.loads(content)
        except (ValueError, RecursionError) as error:
            raise TorchperfdError(f"the analysis of capture {capture_id} is damaged") from error
        return Response(content, media_type="application/json")

    async def request_report(self, request: Request, access: Access) -> Response | dict[str, Any]:
        """Begin to make the page of a capture, or of two compared, or return the link to it."""
        captures = await self._ids(request)
        report = self._reports.request(*captures)
        state = report.state
        if state == "making":
            return await json_answer(request, {"state": state}, 202)
        if state == "failed":
            return {"state": state, "reason": report.reason}
        return {"state": state, "url": self._links.add(Target(captures))}

    async def report(self, request: Request, access: Access) -> Response:
        """The page of a capture, or of two compared, once it is made."""
        captures = await self._ids(request)
        return await self._page(self._reports.find(*captures))

    async def link(self, request: Request, access: Access) -> dict[str, Any]:
        """Make a link to one of a capture's files."""
        capture_id = await self._id(request)
        body = await body_of(request, _LinkBody)
        record = await asyncio.to_thread(self._parts.catalog.get, capture_id)
        if body.file not in {trace.file for trace in record.ranks if trace.file} | {"manifest.json"}:
            raise NoSuchTargetError(f"capture {capture_id} has no file {body.file[:80]!r}")
        return {"url": self._links.add(Target((capture_id,), body.file))}

    async def file(self, request: Request, access: Access) -> Response:
        return await self._send(request, await self._id(request), request.path_params["name"])

    async def linked(self, request: Request) -> Response:
        """What a link leads to, for whichever browser has it."""
        target = self._links.find(request.path_params["key"])
        if target is None:
            return error_response(404, "this link is over", "ask for another on the page")
        try:
            if not target.file:
                return await self._page(self._reports.find(*target.captures))
            return await self._send(request, target.captures[0], target.file)
        except TorchperfdError as error:
            return error_response(404, error.problem, error.remedy)

    async def _ids(self, request: Request) -> PageCaptures:
        names = [name for name in ("id", "other") if name in request.path_params]
        return tuple([await self._id(request, name) for name in names])

    async def _id(self, request: Request, name: str = "id") -> str:
        given: str = request.path_params[name]
        if self._parts.coordinator.live_record(given):
            return given
        kept = await asyncio.to_thread(self._parts.catalog.ids)
        names = {*kept, *(record.capture_id for record in self._parts.coordinator.live_records)}
        found = whole_name(given, names, "capture")
        if found not in names:
            raise NoSuchTargetError(f"no capture {given[:80]!r}", "load /api/v1/captures")
        return found

    def _list(self, query: Query, access: Access) -> tuple[int, list[dict[str, Any]]]:
        catalog = self._parts.catalog
        uploads, listing = catalog.uploads, catalog.list(query)
        rows = [
            capture_dict(each.record, access, listed_dict(catalog, each, uploads=uploads))
            for each in listing.captures
        ]
        return listing.total, rows

    def _one(self, capture_id: str, access: Access) -> dict[str, Any]:
        catalog = self._parts.catalog
        record = self._parts.coordinator.live_record(capture_id) or catalog.get(capture_id)
        return capture_dict(record, access, {"analysed": catalog.has_analysis(capture_id)})

    async def _page(self, report: Report | None) -> Response:
        if report is None or report.state != "ready":
            return error_response(409, "the page is not made yet", "request it with POST first")
        body = await asyncio.to_thread(report.page.read_bytes)
        headers = {"content-type": "text/html; charset=utf-8", "content-security-policy": _REPORT_POLICY}
        return Response(body, headers=headers)

    async def _send(self, request: Request, capture_id: str, name: str) -> Response:
        asked = control_pb2.DownloadRequest(capture_id=capture_id, file=name)
        pieces: AsyncIterator[control_pb2.DownloadPiece] = self._parts.control.Download(
            asked,
            Access.OWNER.call(),  # in place of gRPC's context
        )
        # Before the answer begins: it may be refused.
        first = await anext(pieces)
        extend: Callable[[], None] = request.scope.get("state", {}).get("extend", lambda: None)

        async def body() -> AsyncIterator[bytes]:
            yield first.data
            async for piece in pieces:
                # A client that reads gets the time that it needs.
                extend()
                if piece.data:
                    yield piece.data

        safe = _FILE_NAME.sub("_", f"{capture_id}-{name}")
        kind = "application/json" if name.endswith(".json") else "application/octet-stream"
        headers = {
            "content-disposition": f'attachment; filename="{safe}"',
            "content-length": str(first.size),
            "content-type": kind,
        }
        return StreamingResponse(body(), headers=headers)
