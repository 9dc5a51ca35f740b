"""Serves each user a share of the commands, so that the commands of one do not delay those of another."""

import asyncio
import contextlib
import inspect
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import grpc
from google.protobuf.message import Message

from torchperfd.v1 import session_pb2
from torchperfd_daemon.rpc.callers import CallerDirectory
from torchperfd_daemon.rpc.user_rates import COMMANDS, UserRate

_ATTACH: Final = f"/{session_pb2.DESCRIPTOR.services_by_name['Session'].full_name}/Attach"
_MAX_OPEN: Final = 64
"""Requests of one user at the same time, those that wait included."""
_TOO_MANY: Final = (
    f"this user has {_MAX_OPEN} requests in progress, the most that one user may have; wait for one of them"
)


class CommandRates(grpc.aio.ServerInterceptor):  # type: ignore[type-arg] # generic in the stubs only
    """Slows the commands of a user who sends them faster than any person or page does.

    Sessions are left out; they have rates of their own.
    """

    def __init__(self, callers: CallerDirectory, clock: Callable[[], float] = time.monotonic) -> None:
        self._callers = callers
        self._rate = UserRate("commands", COMMANDS, clock)
        self._open: Counter[int | None] = Counter()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return the method's handler, which waits until its caller may send one more command."""
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method == _ATTACH:
            return handler
        if handler.unary_unary is not None:
            return handler._replace(unary_unary=self._answering(handler.unary_unary))
        if handler.unary_stream is not None:
            is_generator = inspect.isasyncgenfunction(handler.unary_stream)
            limit = self._streaming if is_generator else self._answering
            return handler._replace(unary_stream=limit(handler.unary_stream))
        return handler

    def _answering(
        self, method: Callable[[Any, Any], Awaitable[Any]]
    ) -> Callable[[Any, Any], Awaitable[Any]]:
        async def answer(request: Any, context: Any) -> Any:
            async with self._admitted(context, request):
                return await method(request, context)

        return answer

    def _streaming(self, method: Callable[[Any, Any], Any]) -> Callable[[Any, Any], AsyncIterator[Any]]:
        async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
            async with self._admitted(context, request):
                async for answer in method(request, context):
                    yield answer

        return stream

    @contextlib.asynccontextmanager
    async def _admitted(self, context: Any, request: Any) -> AsyncIterator[None]:
        if isinstance(request, Message):
            self._callers.received(context, request.ByteSize())
        uid = self._callers.find(context).uid
        if self._open[uid] >= _MAX_OPEN:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, _TOO_MANY)
        self._open[uid] += 1
        try:
            await asyncio.sleep(self._rate.take(uid, 1))
            yield
        finally:
            self._open[uid] -= 1
            if self._open[uid] <= 0:
                del self._open[uid]
