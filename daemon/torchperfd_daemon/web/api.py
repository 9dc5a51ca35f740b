"""The interface of the live page: its routes, and what runs behind them."""

from collections.abc import AsyncIterator, Callable
from typing import Final

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from torchperfd_daemon.captures import CaptureRecord
from torchperfd_daemon.diagnosis import Verdict
from torchperfd_daemon.web.access import Access, PageToken
from torchperfd_daemon.web.actions import Acting
from torchperfd_daemon.web.capture_pages import Reports
from torchperfd_daemon.web.captures_api import CapturesApi
from torchperfd_daemon.web.endpoint import AnswerCache, Handler, endpoint, rank_list
from torchperfd_daemon.web.event_hub import EventHub
from torchperfd_daemon.web.guard import error_response
from torchperfd_daemon.web.node_api import NodeApi
from torchperfd_daemon.web.past_runs import PastRuns
from torchperfd_daemon.web.reader import Parts, Reader
from torchperfd_daemon.web.run_rows import RunsFile
from torchperfd_daemon.web.runs_api import RunsApi

_ROOT: Final = "/api/v1"


class Api:
    """All of the interface.

    Args:
        verdict: Returns the published verdict on a run.
        cache: Where documents are kept for a moment.
        reports: What makes the pages of captures.
        runs_file: Keeps the runs of the last day when the daemon ends; None for nothing.
    """

    def __init__(
        self,
        parts: Parts,
        token: PageToken,
        verdict: Callable[[str], Verdict | None] = lambda _: None,
        cache: AnswerCache | None = None,
        reports: Reports | None = None,
        runs_file: RunsFile | None = None,
    ) -> None:
        self._cache = cache or AnswerCache()
        self._token = token
        self._parts = parts
        reader = Reader(parts)
        self.past = PastRuns(parts.store, verdict, file=runs_file)
        self.hub = EventHub(parts, verdict)
        self.past.on_mark = self.hub.send_mark
        self._reader = reader
        self._reports = reports or Reports(parts.catalog)
        self._acting = Acting(parts, reader)
        self._runs = RunsApi(parts, reader, self.past)
        self._captures = CapturesApi(parts, self._reports)
        self._node = NodeApi(parts, reader)

    def routes(self) -> list[Route]:
        """Return the routes."""
        runs, captures, acting = self._runs, self._captures, self._acting
        one, capture = "/runs/{run:path}", "/captures/{id}"
        return [
            self._get("/info", runs.info),
            self._get("/runs", runs.runs),
            self._get("/diagnose", runs.diagnose),
            self._get("/goodput", runs.goodput),
            self._get("/node", self._node.node),
            Route(f"{_ROOT}/events", endpoint(self._token, self._events), methods=["GET"]),
            self._get("/captures", captures.captures),
            self._get(f"{capture}/analysis", captures.analysis, acts=True),
            self._get(f"{capture}/report", captures.report, acts=True),
            self._get(f"{capture}/comparison/{{other}}", captures.report, acts=True),
            self._get(f"{capture}/files/{{name}}", captures.file, acts=True),
            self._get(capture, captures.capture),
            self._post(f"{capture}/report", captures.request_report),
            self._post(f"{capture}/comparison/{{other}}", captures.request_report),
            self._post(f"{capture}/link", captures.link),
            self._post(f"{capture}/cancel", acting.cancel),
            # Names of runs may have slashes, so what follows the name is matched first.
            self._get(f"{one}/ranks/{{rank}}/steps", runs.steps),
            self._get(f"{one}/ranks", runs.ranks),
            self._get(f"{one}/history", runs.history),
            self._get(f"{one}/diagnose", runs.diagnose),
            self._get(f"{one}/goodput", runs.goodput),
            self._post(f"{one}/capture", acting.capture),
            self._post(f"{one}/stacks", acting.stacks),
            self._get(one, runs.run),
            Route("/links/{key}", captures.linked),
            Route("/api/{rest:path}", _nothing, methods=["GET", "POST"]),
        ]

    def on_capture(self, record: CaptureRecord) -> None:
        """A capture has ended, whichever asked for it."""
        self.hub.send_capture(record)
        self.past.add_mark(
            record.run,
            kind="capture",
            unix_seconds=record.requested_at,
            end_unix_seconds=record.ended_at or None,
            capture_id=record.capture_id,
            text=record.state.value,
        )

    async def close(self) -> None:
        """End what is in progress, and keep the runs of the last day."""
        self.past.close()
        await self._acting.close()
        await self._reports.close()

    def _get(self, path: str, handler: Handler, *, acts: bool = False) -> Route:
        cache = None if acts else self._cache
        return Route(f"{_ROOT}{path}", endpoint(self._token, handler, cache, acts=acts), methods=["GET"])

    def _post(self, path: str, handler: Handler) -> Route:
        async def act(request: Request, access: Access) -> Response:
            self._cache.clear()
            return await handler(request, access)

        return Route(f"{_ROOT}{path}", endpoint(self._token, act, acts=True), methods=["POST"])

    async def _events(self, request: Request, access: Access) -> Response:
        given = request.query_params.get("run", "")
        run = await self._reader.run_name(given, access) if given else ""
        ranks = rank_list(request.query_params.get("ranks", ""))
        stream = self.hub.open(run, frozenset(ranks) if ranks else None, access)
        if stream is None:
            return error_response(503, "too many pages listen to this daemon", "close one of them")
        extend: Callable[[], None] = request.scope.get("state", {}).get("extend", lambda: None)

        async def body() -> AsyncIterator[bytes]:
            try:
                async for chunk in stream.chunks(extend):
                    yield chunk
            finally:
                self.hub.close_stream(stream)

        return StreamingResponse(body(), media_type="text/event-stream", headers={"x-accel-buffering": "no"})


async def _nothing(_request: Request) -> Response:
    return error_response(404, "there is no such document", "see docs/http-api.md")
