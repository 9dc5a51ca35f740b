"""An interceptor that counts the calls of a gRPC server, and measures their time."""

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import grpc

from torchperfd_daemon.metrics.health import CallCounts
from torchperfd_daemon.rpc.interceptors import surrounded

_NUMBERS: Final = {code.value[0]: code.name for code in grpc.StatusCode}
_UNKNOWN: Final = grpc.StatusCode.UNKNOWN.name


class CallCounter(grpc.aio.ServerInterceptor):  # type: ignore[type-arg] # generic in the stubs only
    """Counts each call when it ends; outermost, it measures also the wait for a user's rate.

    Methods that the server does not have are not counted: a caller could invent any number of names.
    """

    def __init__(self, counts: CallCounts, clock: Callable[[], float] = time.monotonic) -> None:
        self._counts = counts
        self._clock = clock

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return the method's handler, counted."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        # Of /torchperfd.v1.Control/ListRuns, Control/ListRuns.
        method = str(handler_call_details.method).rpartition(".")[2]
        return surrounded(handler, functools.partial(self._counted, method))

    @contextlib.asynccontextmanager
    async def _counted(self, method: str, _request: Any, context: Any) -> AsyncIterator[None]:
        began = self._clock()
        code = _UNKNOWN  # as gRPC answers for an exception that the method raises
        try:
            yield
            code = _name(context.code())
        except grpc.aio.AbortError:
            code = _name(context.code())
            raise
        except (asyncio.CancelledError, GeneratorExit):
            code = grpc.StatusCode.CANCELLED.name
            raise
        finally:
            self._counts.ended[method, code] += 1
            self._counts.seconds[method] += self._clock() - began


def _name(code: grpc.StatusCode | int | None) -> str:
    """Return the name of a context's code: None if there is none, a number in some releases of gRPC."""
    if code is None:
        return grpc.StatusCode.OK.name
    return code.name if isinstance(code, grpc.StatusCode) else _NUMBERS.get(code, _UNKNOWN)
