"""What all requests of the interface share: access, parameters, errors, JSON, cached answers, streams."""

import asyncio
import contextlib
import gzip
import logging
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any, Final, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from torchperfd.v1 import control_pb2
from torchperfd_daemon.errors import NoSuchTargetError, NotAllowedError, TorchperfdError, UsageError
from torchperfd_daemon.store.store import Rank
from torchperfd_daemon.text import LogLimiter
from torchperfd_daemon.web.access import Access, PageToken
from torchperfd_daemon.web.guard import error_response

MAX_WAITING: Final = 256
HEARTBEAT_S: Final = 5.0
_MAX_BYTES: Final = 4 << 20
_RETRY: Final = b"retry: 2000\n\n"
_HEARTBEAT: Final = b": still here\n\n"


def event(name: str, data: object) -> bytes:
    """Return an event as it goes out."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode(data))


class EventStream:
    """What waits to be sent to one client.

    Args:
        run: The only run that it follows; empty for all runs, without their steps.
        ranks: The ranks whose steps it follows; None for all.
    """

    def __init__(self, run: str, ranks: frozenset[int] | None, access: Access) -> None:
        self.run = run
        self.ranks = ranks
        self.access = access
        self._waiting: deque[bytes] = deque()
        self._bytes = 0
        self._dropped = 0
        self._woken = asyncio.Event()
        self._closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def waiting_bytes(self) -> int:
        """The size of the events that wait."""
        return self._bytes

    def push(self, data: bytes) -> None:
        """Add an event; the oldest ones make room for it."""
        self._waiting.append(data)
        self._bytes += len(data)
        while len(self._waiting) > MAX_WAITING or (self._bytes > _MAX_BYTES and len(self._waiting) > 1):
            self._bytes -= len(self._waiting.popleft())
            self._dropped += 1
        self._woken.set()

    def close(self, last: bytes = b"") -> None:
        """End the stream after what waits, and a last event."""
        if last:
            self.push(last)
        self._closed = True
        self._woken.set()

    async def chunks(self, extend: Callable[[], None] = lambda: None) -> AsyncIterator[bytes]:
        """Yield what is to be sent, until the stream is closed.

        Args:
            extend: Called when the client has taken what was sent.
        """
        yield _RETRY
        while True:
            extend()
            if not self._waiting:
                if self._closed:
                    return
                self._woken.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._woken.wait(), HEARTBEAT_S)
                if not self._waiting and not self._closed:
                    yield _HEARTBEAT
                continue
            parts = [*self._waiting]
            self._waiting.clear()
            self._bytes = 0
            if self._dropped:
                parts.insert(0, event("dropped", {"events": self._dropped}))
                self._dropped = 0
            yield b"".join(parts)


KEPT_S: Final = 0.9
_MAX_ANSWERS: Final = 32
_MAX_ANSWER_BYTES: Final = 256 * 1024


class AnswerCache:
    """Keeps answers for a moment."""

    def __init__(self, seconds: float = KEPT_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._kept: OrderedDict[object, tuple[float, Response]] = OrderedDict()

    def get(self, key: object) -> Response | None:
        """Return the answer to the same request; None without a fresh one."""
        until, answer = self._kept.get(key, (0.0, None))
        return answer if self._clock() < until else None

    def add(self, key: object, answer: Response) -> None:
        """Keep an answer; a long one, or one that is an error, is not kept."""
        if (
            answer.status_code != 200
            or len(getattr(answer, "body", bytes(_MAX_ANSWER_BYTES + 1))) > _MAX_ANSWER_BYTES
        ):
            return
        self._kept.pop(key, None)
        self._kept[key] = self._clock() + self._seconds, answer
        while len(self._kept) > _MAX_ANSWERS:
            self._kept.popitem(last=False)

    def clear(self) -> None:
        """Forget all: something was changed."""
        self._kept.clear()


def view_dict(
    node: str,
    access: Access,
    statuses: "Iterable[control_pb2.RankStatus | Rank]" = (),
    *,
    fleet: bool = False,
    unreachable: Sequence[control_pb2.UnreachablePeer] = (),
    window_seconds: float | None = None,
) -> dict[str, Any]:
    """Return the key ``view`` of a document.

    Args:
        statuses: The ranks that the document is about, as messages or as they are kept here.
        window_seconds: The span of time that it is about; None for none.
    """
    now = time.time()
    known: dict[str, int] = {}
    held: dict[str, int] = {}
    reporting, newest = 0, 0.0
    for status in statuses:
        run = status.identity.run
        known[run] = max(known.get(run, 0), status.identity.world_size)
        held[run] = held.get(run, 0) + 1
        reporting += status.connected
        newest = max(newest, status.last_step_unix_seconds)
    ranks = sum(max(size, held[run]) for run, size in known.items())
    return {
        "scope": "fleet" if fleet else "node",
        "node": node,
        "at_unix_seconds": now,
        "window_seconds": window_seconds,
        "newest_unix_seconds": newest or None,
        "age_seconds": max(0.0, now - newest) if newest else None,
        "ranks_known": ranks,
        "ranks_reporting": reporting,
        "ranks_elsewhere": ranks - reporting,
        "unreachable": [{"address": peer.address, "reason": peer.reason} for peer in unreachable],
        "access": access.value,
    }


log = logging.getLogger("torchperfd.http")
_failures: Final = LogLimiter(log)

T = TypeVar("T")

Handler = Callable[[Request, Access], Awaitable[Response | dict[str, Any]]]
"""Answers a request; a document is sent as JSON."""

MAX_RANK: Final = 2**24
MAX_RANKS: Final = 4096
"""That a request may name."""

_ZIPPED_FROM_BYTES: Final = 1024
_IN_A_THREAD_FROM_BYTES: Final = 64 * 1024
_GZIP_LEVEL: Final = 1
_MAX_CHARACTERS: Final = 500
_STATUSES: Final = (
    (NotAllowedError, 403),
    (NoSuchTargetError, 404),
    (UsageError, 400),
    (TorchperfdError, 409),
)


def endpoint(
    token: PageToken, handler: Handler, cache: AnswerCache | None = None, *, acts: bool = False
) -> Callable[[Request], Awaitable[Response]]:
    """Return a route's function: it finds out what the caller may do, and turns errors into answers.

    Args:
        cache: Where the answers of the last second are; None for a route whose answers are not kept.
        acts: Only for the holder of the token.
    """

    async def checked(request: Request, access: Access) -> Response:
        zipped = "gzip" in request.headers.get("accept-encoding", "")
        key = access, request.url.path, request.url.query, zipped
        kept = cache.get(key) if cache is not None else None
        if kept is None:
            found = await handler(request, access)
            kept = found if isinstance(found, Response) else await json_answer(request, found)
            if cache is not None:
                cache.add(key, kept)
        return kept

    async def answer(request: Request) -> Response:
        access = token.access_of(request.headers)
        if access is Access.REFUSED or (acts and access is not Access.OWNER):
            return error_response(401, "this needs the page's token", "open the page with `torchperfd open`")
        try:
            return await checked(request, access)
        except TorchperfdError as error:
            status = next(status for kind, status in _STATUSES if isinstance(error, kind))
            return error_response(status, error.problem, error.remedy)
        except Exception:  # noqa: BLE001 - logged by the limiter
            # Without a traceback for the client, and without the end of the daemon.
            _failures.exception("%s %s failed", request.method, request.url.path[:_MAX_CHARACTERS])
            return error_response(500, "the daemon failed to answer", "see its log")

    return answer


async def json_answer(request: Request, document: object, status: int = 200) -> Response:
    """Return a document as JSON, compressed where the client takes that."""
    body = msgspec.json.encode(document)
    headers = {"content-type": "application/json", "vary": "accept-encoding"}
    if len(body) >= _ZIPPED_FROM_BYTES and "gzip" in request.headers.get("accept-encoding", ""):
        headers["content-encoding"] = "gzip"
        if len(body) < _IN_A_THREAD_FROM_BYTES:
            body = gzip.compress(body, _GZIP_LEVEL, mtime=0)
        else:
            body = await asyncio.to_thread(gzip.compress, body, _GZIP_LEVEL, mtime=0)
    return Response(body, status, headers)


def number(request: Request, name: str, default: T, least: float, most: float, kind: Callable[[str], T]) -> T:
    """Return a number out of a request's query.

    Raises:
        UsageError: It is no number, or out of range.
    """
    given = request.query_params.get(name)
    if given is None:
        return default
    try:
        value = kind(given)
        if least <= value <= most:  # type: ignore[operator]
            return value
    except ValueError:
        pass
    raise UsageError(f"{name} must be a number from {least:g} to {most:g}")


def flag(request: Request, name: str, default: bool = False) -> bool:
    """Return a switch out of a request's query.

    Raises:
        UsageError: It is neither 0 nor 1.
    """
    given = request.query_params.get(name, str(int(default)))
    if given not in ("0", "1"):
        raise UsageError(f"{name} must be 0 or 1")
    return given == "1"


def rank_number(text: str) -> int | None:
    """Return the rank that a text in a path or query names; None if it names none."""
    digits = text.lstrip("0") or text[:1]
    if not digits.isascii() or not digits.isdecimal() or len(digits) > len(str(MAX_RANK)):
        return None
    rank = int(digits)
    return rank if rank <= MAX_RANK else None


async def body_of(request: Request, kind: type[T]) -> T:
    """Return the JSON object that a request carries; an empty body is an object without keys.

    Raises:
        UsageError: It is no such object.
    """
    content_type = request.headers.get("content-type", "application/json").partition(";")[0].strip()
    if content_type.lower() != "application/json":
        raise UsageError("the body must be application/json")
    try:
        return msgspec.json.decode(await request.body() or b"{}", type=kind)
    except (ValueError, RecursionError, OverflowError) as error:
        raise UsageError(f"the body is wrong: {str(error)[:_MAX_CHARACTERS]}") from error
