"""Acting over HTTP, with the token: captures, stacks, and the cancellation of captures."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Annotated, Any, Final, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from torchperfd.v1 import control_pb2, session_pb2
from torchperfd_daemon.captures.attempt import MAX_STEPS
from torchperfd_daemon.errors import TorchperfdError
from torchperfd_daemon.service import translate_diagnosis
from torchperfd_daemon.stacks import RankStacks, merge
from torchperfd_daemon.stacks.report import to_dict as stacks_dict
from torchperfd_daemon.views.fleet import absent_ranks, each_once
from torchperfd_daemon.web.access import Access
from torchperfd_daemon.web.endpoint import MAX_RANK, body_of, json_answer
from torchperfd_daemon.web.reader import Parts, Reader

MAX_CAPTURES: Final = 16

_STACKS_S: Final = 5.0
_KINDS: Final = {
    "trace": session_pb2.CAPTURE_KIND_TRACE,
    "memory": session_pb2.CAPTURE_KIND_MEMORY,
}

_Ranks = Annotated[list[Annotated[int, msgspec.Meta(ge=0, le=MAX_RANK)]], msgspec.Meta(max_length=4096)]


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
        progress = self._parts.control.Capture(asked, _as(access))
        # Before the answer: it may be refused.
        first = await anext(progress)
        task = asyncio.create_task(_follow(progress))
        self._captures.add(task)
        task.add_done_callback(self._captures.discard)
        document = {
            "capture_id": first.capture_id,
            "run": first.run,
            "state": _word(first.state),
            "reason": first.reason,
            "ranks": [
                {"rank": rank.rank, "state": _word(rank.state), "reason": rank.reason} for rank in first.ranks
            ],
        }
        return await json_answer(request, document, 202)

    async def stacks(self, request: Request, access: Access) -> Response:
        """Read where every thread of the ranks is."""
        body = await body_of(request, _StacksBody)
        run = await self._reader.run_name(request.path_params["run"], access)
        asked = control_pb2.StacksRequest(run=run, ranks=body.ranks, timeout_seconds=_STACKS_S)
        answers: list[RankStacks] = [
            translate_diagnosis.rank_stacks_from_message(message)
            async for message in self._parts.control.Stacks(asked, _as(access))
        ]
        if not answers:
            raise TorchperfdError("no rank has answered", "see the daemon's log")
        answers = each_once(answers)
        absent = absent_ranks(answers, body.ranks)
        return await json_answer(request, stacks_dict(run, answers, merge(answers), absent))

    async def cancel(self, request: Request, access: Access) -> Response:
        """Cancel a capture that is queued or in progress."""
        await body_of(request, _NoBody)
        asked = control_pb2.CancelCaptureRequest(capture_id=request.path_params["id"])
        await self._parts.control.CancelCapture(asked, _as(access))
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


def _word(state: int) -> str:
    name = control_pb2.CaptureState.Name(control_pb2.CaptureState.ValueType(state))
    return name.removeprefix("CAPTURE_STATE_").lower()


def _as(access: Access) -> Any:
    """Return a call with the rights of a caller, in place of gRPC's context."""
    return access.call()
