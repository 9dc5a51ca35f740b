"""The files of the live page, out of the package: only those that are listed when the daemon starts."""

import gzip
import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

DIRECTORY: Final = Path(__file__).parent / "assets"
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

    def __init__(self, directory: Path = DIRECTORY) -> None:
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
