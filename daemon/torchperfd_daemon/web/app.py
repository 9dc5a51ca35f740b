"""The daemon's HTTP side: the metrics page and two health endpoints, and nothing else."""

import gzip
import logging
import time
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from torchperfd_daemon.metrics import MetricsPage
from torchperfd_daemon.web.basic_auth import BasicAuth
from torchperfd_daemon.web.config_file import WebConfigFile

log = logging.getLogger("torchperfd.http")

_OPENMETRICS: Final = "application/openmetrics-text"
_ASKED: Final = {False: "text/plain;version=0.0.4", True: f"{_OPENMETRICS};version=1.0.0"}
# The least effort: a page shrinks to a tenth either way, and more of it costs more than the page.
_GZIP_LEVEL: Final = 1
_RENDERING_SHARE: Final = 0.1
_PROBES: Final = ("/-/healthy", "/-/ready")
"""Paths without a password, because a kubelet has none; they show only the daemon's state."""


def build_app(
    page: MetricsPage,
    is_ready: Callable[[], bool],
    web_config: WebConfigFile | None = None,
) -> ASGIApp:
    """Return the ASGI application.

    Args:
        is_ready: Whether clients are being served; false while starting and draining.
        web_config: Which users may read; all when None. The two health endpoints are open to all.
    """
    pages = PageCache(page)

    async def metrics(request: Request) -> Response:
        zipped = _takes(request.headers.get("accept-encoding", ""), "gzip")
        shown = pages.get(_takes(request.headers.get("accept", ""), _OPENMETRICS), zipped)
        headers = {"content-type": shown.content_type, "vary": "accept, accept-encoding"}
        if zipped:
            headers["content-encoding"] = "gzip"
        return Response(shown.body, headers=headers)

    async def healthy(_request: Request) -> Response:
        return PlainTextResponse("torchperfd is healthy\n")

    async def ready(_request: Request) -> Response:
        if is_ready():
            return PlainTextResponse("torchperfd is ready\n")
        return PlainTextResponse("torchperfd is not ready\n", status_code=503)

    app = Starlette(
        routes=[
            Route("/metrics", metrics),
            Route("/-/healthy", healthy),
            Route("/-/ready", ready),
        ]
    )
    # A path with a slash too many is not there, rather than elsewhere.
    app.router.redirect_slashes = False
    return _Guard(app, web_config)


class Shown(NamedTuple):
    """A page as it goes out."""

    body: bytes
    content_type: str
    good_until: float


class PageCache:
    """Renders the page so seldom that a scraper in a hurry cannot keep the daemon busy.

    What took a time t to render is good for nine times t more.
    """

    def __init__(self, page: MetricsPage, clock: Callable[[], float] = time.monotonic) -> None:
        self._page = page
        self._clock = clock
        self._kept: dict[tuple[bool, bool], Shown] = {}

    def get(self, openmetrics: bool, zipped: bool) -> Shown:
        """Return the page in one of its four forms."""
        kept = self._kept.get((openmetrics, zipped))
        began = self._clock()
        if kept is not None and began < kept.good_until:
            return kept
        if zipped:
            plain = self.get(openmetrics, zipped=False)
            body, content_type = gzip.compress(plain.body, _GZIP_LEVEL, mtime=0), plain.content_type
        else:
            body, content_type = self._page.render(_ASKED[openmetrics])
        now = self._clock()
        log.debug("rendered /metrics: %d bytes, gzip %s, %.1f ms", len(body), zipped, (now - began) * 1e3)
        shown = Shown(body, content_type, now + (now - began) * (1 / _RENDERING_SHARE - 1))
        self._kept[openmetrics, zipped] = shown
        return shown


class _Guard:
    """Lets requests through that carry no body and come from users that may read; probes need no user."""

    def __init__(self, app: ASGIApp, web_config: WebConfigFile | None) -> None:
        self._app = app
        self._web_config = web_config
        self._auth = BasicAuth()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        app = self._app
        if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
            # Unread, and the connection with it: nothing here takes a body, of whatever size.
            app = PlainTextResponse("no request here has a body\n", 413, {"connection": "close"})
        elif self._web_config is not None:
            config = self._web_config.current()
            send = _adding(config.headers, send) if config.headers else send
            guarded = config.users and scope.get("path") not in _PROBES
            if guarded and not await self._auth.admits(headers.get("authorization", ""), config.users):
                app = PlainTextResponse(
                    "not authorised\n", 401, {"www-authenticate": 'Basic realm="torchperfd"'}
                )
        await app(scope, receive, send)


def _adding(extra: Mapping[str, str], send: Send) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(extra)
        await send(message)

    return send_with_headers


def _takes(header: str, what: str) -> bool:
    """Tell whether ``Accept`` or ``Accept-Encoding`` names something, and does not rule it out."""
    for part in header.split(","):
        name, *parameters = (piece.strip().lower() for piece in part.split(";"))
        if name == what:
            weight = next((value[2:] for value in parameters if value.startswith("q=")), "1")
            return weight.strip("0.") != ""
    return False
