"""Interceptors of the gRPC server: they check requests before parsing, limit users' commands, count calls.

A message of a few megabytes can hold millions of empty ones, and parsing it would block all other requests.
For one that cannot be parsed at all, gRPC would write a traceback.
"""

import asyncio
import contextlib
import functools
import inspect
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError, Message

from torchperfd.v1 import session_pb2
from torchperfd_daemon.errors import NoSuchTargetError, NotAllowedError, TorchperfdError, UsageError
from torchperfd_daemon.metrics.health import CallCounts
from torchperfd_daemon.rpc.callers import COMMANDS, CallerDirectory, UserRate
from torchperfd_daemon.text import LogLimiter

log = logging.getLogger("torchperfd.session")

MAX_MESSAGE_BYTES: Final = 16 * 1024 * 1024
"""Of steps: a client that was disconnected has up to ten megabytes of them."""
MAX_BUNDLED: Final = 64
"""Messages in a bundle; clients put in 16."""

_MAX_OTHER_BYTES: Final = 1024 * 1024
_MAX_FIELDS: Final = 128
_LENGTH_DELIMITED: Final = 2
_ATTACH: Final = f"/{session_pb2.DESCRIPTOR.services_by_name['Session'].full_name}/Attach"
_STEPS: Final = session_pb2.ClientMessage.STEPS_FIELD_NUMBER
_BUNDLE: Final = session_pb2.ClientMessage.BUNDLE_FIELD_NUMBER


Around = Callable[[Any, Any], contextlib.AbstractAsyncContextManager[None]]
"""Returns what surrounds a call, given its request and its context."""

_KINDS: Final = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


def surrounded(handler: Any, around: Around) -> Any:
    """Return a method's handler whose calls are surrounded."""
    kind = next(kind for kind in _KINDS if getattr(handler, kind) is not None)
    serve = getattr(handler, kind)

    async def answer(request: Any, context: Any) -> Any:
        async with around(request, context):
            return await serve(request, context)

    async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
        async with around(request, context):
            async for each in serve(request, context):
                yield each

    return handler._replace(**{kind: stream if inspect.isasyncgenfunction(serve) else answer})


class _Interceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg] # generic in the stubs only
    """Changes the handlers of the methods that the server has."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        return handler if handler is None else self.changed(handler, str(handler_call_details.method))

    def changed(self, handler: Any, method: str) -> Any:
        """Return a method's handler as it is to be called."""
        raise NotImplementedError


_STATUSES: Final = (
    (NotAllowedError, grpc.StatusCode.PERMISSION_DENIED),
    (NoSuchTargetError, grpc.StatusCode.NOT_FOUND),
    (UsageError, grpc.StatusCode.INVALID_ARGUMENT),
    (TorchperfdError, grpc.StatusCode.FAILED_PRECONDITION),
)


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Stands for a request that is refused."""

    reason: str


class RequestGuard(_Interceptor):
    """Checks each request before it is parsed, and ends a call with the reason why it fails.

    The reason is that of the check, or of an error that the method raises.
    """

    def __init__(self) -> None:
        self._limiter = LogLimiter(log)

    def changed(self, handler: Any, method: str) -> Any:
        """Return it with a careful deserializer."""
        if handler.request_deserializer is None:
            return handler
        careful = handler._replace(request_deserializer=self._careful(method, handler.request_deserializer))
        return careful if method == _ATTACH else surrounded(careful, _explained)

    def _careful(self, method: str, read: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
        check = check_client_message if method == _ATTACH else check_request

        def careful(data: bytes) -> Any:
            try:
                check(data)
                return read(data)
            except (DecodeError, ValueError) as error:
                reason = str(error) if isinstance(error, TooLargeError) else "the message cannot be read"
                self._limiter.warning("%s: a request of %d bytes is refused: %s", method, len(data), reason)
                return Unreadable(reason)

        return careful


class TooLargeError(ValueError):
    """A message has more in it than any of ours."""


def check_request(data: bytes) -> None:
    """Make sure that reading a request takes milliseconds.

    Raises:
        TooLargeError: It may take longer.
    """
    if len(data) > _MAX_OTHER_BYTES:
        raise TooLargeError(f"a message of {len(data)} bytes is larger than any of ours")


def check_client_message(data: bytes) -> None:
    """Make sure that reading a message of a session takes milliseconds.

    Only steps may be large: their columns are read in one piece.

    Raises:
        TooLargeError: It may take longer.
        ValueError: It is no message.
    """
    if len(data) <= _MAX_OTHER_BYTES:
        return
    for number, begin, end in _fields(data, 0, len(data)):
        if number == _BUNDLE:
            for _, first, last in _fields(data, begin, end):
                for part, start, stop in _fields(data, first, last):
                    _check_part(data, part, start, stop)
        else:
            _check_part(data, number, begin, end)


def _check_part(data: bytes, number: int, begin: int, end: int) -> None:
    if number == _STEPS:
        for _ in _fields(data, begin, end):
            pass
    elif end - begin > _MAX_OTHER_BYTES:
        raise TooLargeError(f"a message of {end - begin} bytes is larger than any of ours")


def _fields(data: bytes, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield number, begin and end of the length-delimited fields of a message; the others are short.

    Raises:
        TooLargeError: There are more than any message of ours has.
        ValueError: It is no message.
    """
    for _ in range(_MAX_FIELDS):
        if begin >= end:
            return
        tag, begin = _varint(data, begin, end)
        kind = tag & 7
        if kind == _LENGTH_DELIMITED:
            length, begin = _varint(data, begin, end)
            if begin + length > end:
                raise ValueError("a field is longer than its message")
            yield tag >> 3, begin, begin + length
            begin += length
        elif kind == 0:
            _, begin = _varint(data, begin, end)
        elif kind in (1, 5):
            begin += 8 if kind == 1 else 4
        else:
            raise ValueError(f"there are no fields of kind {kind}")
    if begin < end:
        raise TooLargeError(f"a message of {end} bytes has more than {_MAX_FIELDS} fields")


def _varint(data: bytes, begin: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while begin < end and shift < 70:
        byte = data[begin]
        begin += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, begin
        shift += 7
    raise ValueError("a number does not end")


@contextlib.asynccontextmanager
async def _explained(request: Any, context: Any) -> AsyncIterator[None]:
    if isinstance(request, Unreadable):
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, request.reason)
    try:
        yield
    except TorchperfdError as error:
        status = next(status for kind, status in _STATUSES if isinstance(error, kind))
        await context.abort(status, str(error))


_MAX_OPEN_COMMANDS: Final = 64
"""Requests of one user at the same time, those that wait included."""
_TOO_MANY_COMMANDS: Final = (
    f"this user has {_MAX_OPEN_COMMANDS} requests in progress, the most that one user may have;"
    " wait for one of them"
)


class CommandRates(_Interceptor):
    """Slows the commands of a user who sends them faster than any person or page does.

    Sessions are left out; they have rates of their own.
    """

    def __init__(self, callers: CallerDirectory, clock: Callable[[], float] = time.monotonic) -> None:
        self._callers = callers
        self._rate = UserRate("commands", COMMANDS, clock)
        self._open: Counter[int | None] = Counter()

    def changed(self, handler: Any, method: str) -> Any:
        """Return it so that it waits until its caller may send one more command."""
        return handler if method == _ATTACH else surrounded(handler, self._admitted)

    @contextlib.asynccontextmanager
    async def _admitted(self, request: Any, context: Any) -> AsyncIterator[None]:
        if isinstance(request, Message):
            self._callers.received(context, request.ByteSize())
        uid = self._callers.find(context).uid
        if self._open[uid] >= _MAX_OPEN_COMMANDS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, _TOO_MANY_COMMANDS)
        self._open[uid] += 1
        try:
            await asyncio.sleep(self._rate.take(uid, 1))
            yield
        finally:
            self._open[uid] -= 1
            if self._open[uid] <= 0:
                del self._open[uid]


_NUMBERS: Final = {code.value[0]: code.name for code in grpc.StatusCode}
_UNKNOWN: Final = grpc.StatusCode.UNKNOWN.name


class CallCounter(_Interceptor):
    """Counts each call when it ends; outermost, it measures also the wait for a user's rate.

    Methods that the server does not have are not counted: a caller could invent any number of names.
    """

    def __init__(self, counts: CallCounts, clock: Callable[[], float] = time.monotonic) -> None:
        self._counts = counts
        self._clock = clock

    def changed(self, handler: Any, method: str) -> Any:
        # Of /torchperfd.v1.Control/ListRuns, Control/ListRuns.
        return surrounded(handler, functools.partial(self._counted, method.rpartition(".")[2]))

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
