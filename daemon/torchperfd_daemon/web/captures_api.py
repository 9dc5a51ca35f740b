"""Captures over HTTP: the list, each one with its progress, its analysis as a page, and its files."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from torchperfd.v1 import control_pb2
from torchperfd_daemon.captures import CaptureRecord, Listed, Query
from torchperfd_daemon.errors import NoSuchTargetError, TorchperfdError
from torchperfd_daemon.views.captures import listed_dict, whole_name
from torchperfd_daemon.web.access import Access, Links
from torchperfd_daemon.web.capture_pages import PageCaptures, Report, Reports
from torchperfd_daemon.web.endpoint import body_of, json_answer, number, view_dict
from torchperfd_daemon.web.guard import error_response
from torchperfd_daemon.web.reader import Parts

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

    async def captures(self, request: Request, access: Access) -> Response:
        """The newest captures."""
        query = Query(
            run=request.query_params.get("run", ""), limit=number(request, "limit", 100, 1, MAX_LISTED, int)
        )
        catalog = self._parts.catalog
        listing, rows = await asyncio.to_thread(self._list, query, access)
        document = {
            "schema": "torchperfd.captures/1",
            "directory": str(catalog.directory) if access is Access.OWNER else None,
            "total": listing,
            "captures": rows,
            "view": view_dict(self._parts.node, access),
        }
        return await json_answer(request, document)

    async def capture(self, request: Request, access: Access) -> Response:
        """One capture."""
        capture_id = await self._id(request)
        document = await asyncio.to_thread(self._one, capture_id, access)
        return await json_answer(request, {**document, "view": view_dict(self._parts.node, access)})

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

    async def request_report(self, request: Request, access: Access) -> Response:
        """Begin to make the page of a capture, or of two compared, or return the link to it."""
        captures = await self._ids(request)
        report = self._reports.request(*captures)
        state = report.state
        if state == "making":
            return await json_answer(request, {"state": state}, 202)
        if state == "failed":
            return await json_answer(request, {"state": state, "reason": report.reason})
        return await json_answer(request, {"state": state, "url": self._links.add(Target(captures))})

    async def report(self, request: Request, access: Access) -> Response:
        """The page of a capture, or of two compared, once it is made."""
        captures = await self._ids(request)
        return await self._page(self._reports.find(*captures))

    async def link(self, request: Request, access: Access) -> Response:
        """Make a link to one of a capture's files."""
        capture_id = await self._id(request)
        body = await body_of(request, _LinkBody)
        record = await asyncio.to_thread(self._parts.catalog.get, capture_id)
        if body.file not in {trace.file for trace in record.ranks if trace.file} | {"manifest.json"}:
            raise NoSuchTargetError(f"capture {capture_id} has no file {body.file[:80]!r}")
        return await json_answer(request, {"url": self._links.add(Target((capture_id,), body.file))})

    async def file(self, request: Request, access: Access) -> Response:
        """One of a capture's files."""
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
        """Return the captures in a page's path: one, or two that are compared."""
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
        uploads = catalog.uploads
        listing = catalog.list(query)
        return listing.total, [self._row(listed, access, uploads=uploads) for listed in listing.captures]

    def _one(self, capture_id: str, access: Access) -> dict[str, Any]:
        catalog = self._parts.catalog
        record = self._parts.coordinator.live_record(capture_id) or catalog.get(capture_id)
        return capture_dict(record, access, {"analysed": catalog.has_analysis(capture_id)})

    def _row(self, listed: Listed, access: Access, *, uploads: bool) -> dict[str, Any]:
        more = listed_dict(self._parts.catalog, listed, uploads=uploads)
        return capture_dict(listed.record, access, more)

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
            Access.OWNER.call(),  # type: ignore[arg-type]  # in place of gRPC's context
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
