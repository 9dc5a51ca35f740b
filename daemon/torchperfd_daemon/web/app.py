"""The HTTP application: the metrics page, two health endpoints, the live page's files and interface."""

import gzip
import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final, NamedTuple

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from torchperfd_daemon.metrics.page import MetricsPage
from torchperfd_daemon.web.config_file import WebConfigFile
from torchperfd_daemon.web.guard import Guard, Sites

ASSETS: Final = Path(__file__).parent / "assets"
INDEX: Final = "index.html"

# A file of any other kind is not served.
_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".woff2": "font/woff2",
    ".txt": "text/plain; charset=utf-8",
    ".webmanifest": "application/manifest+json",
}
_PACKED: Final = (".png", ".ico", ".woff2")


@dataclass(frozen=True)
class Asset:
    """One file of the page."""

    path: Path

    @cached_property
    def body(self) -> bytes:
        """Its content."""
        return self.path.read_bytes()

    @cached_property
    def zipped(self) -> bytes | None:
        """Its content for clients that take gzip; None where that does not help."""
        return None if self.path.suffix in _PACKED else gzip.compress(self.body, mtime=0)

    @cached_property
    def etag(self) -> str:
        """What changes when the content does."""
        return f'"{hashlib.sha256(self.body).hexdigest()[:32]}"'

    def answer(self, request: Request) -> Response:
        """Return the file, or that the client's copy is still right."""
        headers = {"etag": self.etag, "cache-control": "no-cache", "vary": "accept-encoding"}
        if self.etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        body = self.body
        if self.zipped is not None and "gzip" in request.headers.get("accept-encoding", ""):
            body, headers["content-encoding"] = self.zipped, "gzip"
        return Response(body, headers={**headers, "content-type": _TYPES[self.path.suffix]})


class Assets:
    """The page's files by name.

    Args:
        directory: Regular files anywhere below it are served; links are not.
    """

    def __init__(self, directory: Path = ASSETS) -> None:
        self._files = {
            path.relative_to(directory).as_posix(): Asset(path)
            for path in sorted(directory.rglob("*"))
            if path.suffix in _TYPES and path.is_file() and not path.is_symlink()
        }

    @property
    def names(self) -> list[str]:
        """Names below ``/assets/``."""
        return [*self._files]

    async def page(self, request: Request) -> Response:
        """Answer with the page itself, which finds out from its address what to show."""
        return self._files[INDEX].answer(request)

    async def file(self, request: Request) -> Response:
        """Answer with one of its files."""
        asset = self._files.get(request.path_params["name"])
        if asset is None:
            return PlainTextResponse("no such file\n", 404)
        return asset.answer(request)


log = logging.getLogger("torchperfd.http")

_OPENMETRICS: Final = "application/openmetrics-text"
_ASKED: Final = {False: "text/plain;version=0.0.4", True: f"{_OPENMETRICS};version=1.0.0"}
# The least effort: a page shrinks to a tenth either way, and more of it costs more than the page.
_GZIP_LEVEL: Final = 1
_RENDERING_SHARE: Final = 0.1
_PAGES: Final = ("/", "/runs", "/runs/{rest:path}", "/captures", "/captures/{rest:path}", "/compare", "/node")
"""The views of the live page: each has an address of its own, and one file shows all of them."""


def build_app(
    page: MetricsPage,
    is_ready: Callable[[], bool],
    web_config: WebConfigFile | None = None,
    routes: Sequence[BaseRoute] = (),
    sites: Sites | None = None,
) -> ASGIApp:
    """Return the ASGI application.

    Args:
        is_ready: Whether clients are being served; false while starting and draining.
        web_config: Which users may read; all when None. The two health endpoints are open to all.
        routes: Further ones: the interface of the live page.
        sites: The names that this daemon is reached by; loopback and this node's name by default.
    """
    assets = Assets()
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
            *routes,
            *(Route(path, assets.page) for path in _PAGES),
            Route("/assets/{name:path}", assets.file),
        ]
    )
    # A path with a slash too many is not there, rather than elsewhere.
    app.router.redirect_slashes = False
    return Guard(app, web_config, sites or Sites())


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


def _takes(header: str, what: str) -> bool:
    """Tell whether ``Accept`` or ``Accept-Encoding`` names something, and does not rule it out."""
    for part in header.split(","):
        name, *parameters = (piece.strip().lower() for piece in part.split(";"))
        if name == what:
            weight = next((value[2:] for value in parameters if value.startswith("q=")), "1")
            return weight.strip("0.") != ""
    return False
