"""The interface of the live page: its routes, and the actions that need the token.

Actions are captures, stacks, and the cancellation of captures.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any, Final, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from torchperfd.v1 import control_pb2, session_pb2
from torchperfd_daemon.captures.attempt import MAX_STEPS
from torchperfd_daemon.captures.manifest import CaptureRecord
from torchperfd_daemon.diagnosis.verdict import Verdict
from torchperfd_daemon.errors import TorchperfdError
from torchperfd_daemon.service import translate_diagnosis
from torchperfd_daemon.stacks.merge import merge
from torchperfd_daemon.stacks.model import RankStacks
from torchperfd_daemon.stacks.report import to_dict as stacks_dict
from torchperfd_daemon.views.documents import absent_ranks, each_once
from torchperfd_daemon.views.model import capture_state, parse_ranks
from torchperfd_daemon.web.access import Access, PageToken, Parts, Reader
from torchperfd_daemon.web.captures_api import CapturesApi, Reports
from torchperfd_daemon.web.endpoint import (
    MAX_RANK,
    MAX_RANKS,
    AnswerCache,
    Handler,
    body_of,
    endpoint,
    json_answer,
)
from torchperfd_daemon.web.event_hub import EventHub
from torchperfd_daemon.web.guard import error_response
from torchperfd_daemon.web.node_api import NodeApi
from torchperfd_daemon.web.past_runs import PastRuns
from torchperfd_daemon.web.run_rows import RunsFile
from torchperfd_daemon.web.runs_api import RunsApi

MAX_CAPTURES: Final = 16

_STACKS_S: Final = 5.0
_KINDS: Final = {
    "trace": session_pb2.CAPTURE_KIND_TRACE,
    "memory": session_pb2.CAPTURE_KIND_MEMORY,
}

_Ranks = Annotated[list[Annotated[int, msgspec.Meta(ge=0, le=MAX_RANK)]], msgspec.Meta(max_length=MAX_RANKS)]


class _CaptureBody(msgspec.Struct, forbid_unknown_fields=True):
    steps: Annotated[int, msgspec.Meta(ge=1, le=MAX_STEPS)] = 5
    ranks: _Ranks = []
    kind: Literal["trace", "memory"] = "trace"
    with_stack: bool = False
    record_shapes: bool = False
    profile_memory: bool = False
    queue: bool = False
    fleet: bool = False


class _StacksBody(msgspec.Struct, forbid_unknown_fields=True):
    ranks: _Ranks = []


class _NoBody(msgspec.Struct, forbid_unknown_fields=True):
    pass


class Acting:
    """Requests that change something; every one is in the audit log."""

    def __init__(self, parts: Parts, reader: Reader) -> None:
        self._parts = parts
        self._reader = reader
        self._captures: set[asyncio.Task[None]] = set()

    async def capture(self, request: Request, access: Access) -> Response:
        """Begin a capture; it goes on when the connection closes."""
        body = await body_of(request, _CaptureBody)
        run = await self._reader.run_name(request.path_params["run"], access, fleet=body.fleet)
        if len(self._captures) >= MAX_CAPTURES:
            raise TorchperfdError("too many captures are in progress", "wait for one of them, or cancel one")
        options = session_pb2.CaptureOptions(
            steps=body.steps,
            kind=_KINDS[body.kind],
            with_stack=body.with_stack,
            record_shapes=body.record_shapes,
            profile_memory=body.profile_memory,
        )
        asked = control_pb2.CaptureRequest(
            run=run, ranks=body.ranks, options=options, queue=body.queue, fleet=body.fleet
        )
        progress = self._parts.control.Capture(asked, access.call())
        # Before the answer: it may be refused.
        first = await anext(progress)
        task = asyncio.create_task(_follow(progress))
        self._captures.add(task)
        task.add_done_callback(self._captures.discard)
        document = {
            "capture_id": first.capture_id,
            "run": first.run,
            "state": capture_state(first.state),
            "reason": first.reason,
            "ranks": [
                {"rank": rank.rank, "state": capture_state(rank.state), "reason": rank.reason}
                for rank in first.ranks
            ],
        }
        return await json_answer(request, document, 202)

    async def stacks(self, request: Request, access: Access) -> dict[str, Any]:
        """Read where every thread of the ranks is."""
        body = await body_of(request, _StacksBody)
        run = await self._reader.run_name(request.path_params["run"], access)
        asked = control_pb2.StacksRequest(run=run, ranks=body.ranks, timeout_seconds=_STACKS_S)
        answers: list[RankStacks] = [
            translate_diagnosis.rank_stacks_from_message(message)
            async for message in self._parts.control.Stacks(asked, access.call())
        ]
        if not answers:
            raise TorchperfdError("no rank has answered", "see the daemon's log")
        answers = each_once(answers)
        absent = absent_ranks(answers, body.ranks)
        return stacks_dict(run, answers, merge(answers), absent)

    async def cancel(self, request: Request, access: Access) -> Response:
        """Cancel a capture that is queued or in progress."""
        await body_of(request, _NoBody)
        asked = control_pb2.CancelCaptureRequest(capture_id=request.path_params["id"])
        await self._parts.control.CancelCapture(asked, access.call())
        return await json_answer(request, {"capture_id": asked.capture_id}, 202)

    async def close(self) -> None:
        """Give up the captures in progress."""
        for task in self._captures:
            task.cancel()
        await asyncio.gather(*self._captures, return_exceptions=True)


async def _follow(progress: AsyncIterator[Any]) -> None:
    """Take a capture's changes to its end: it is given up when no one does."""
    # Whatever goes wrong from now on is in its manifest.
    with contextlib.suppress(Exception):
        async for _ in progress:
            pass


_ROOT: Final = "/api/v1"


class Api:
    """All of the interface.

    Args:
        verdict: Returns the published verdict on a run.
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
        async def act(request: Request, access: Access) -> Response | dict[str, Any]:
            self._cache.clear()
            return await handler(request, access)

        return Route(f"{_ROOT}{path}", endpoint(self._token, act, acts=True), methods=["POST"])

    async def _events(self, request: Request, access: Access) -> Response:
        given = request.query_params.get("run", "")
        run = await self._reader.run_name(given, access) if given else ""
        ranks = parse_ranks(request.query_params.get("ranks", ""), MAX_RANKS)
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
