"""Decides which requests are served: by their body, site and user; adds the headers of every answer.

A foreign page in a browser must not reach the daemon through it. Such a page can send requests to any
address, and can have its own name point at the daemon (DNS rebinding). A browser cannot forge ``Host`` and
``Origin``, so both are checked. Passwords are compared with bcrypt hashes on a thread, so that guesses do not
block the daemon.
"""

import asyncio
import base64
import binascii
import hashlib
import ipaddress
import os
import socket
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from torchperfd_daemon.web.config_file import WebConfigFile

CONTENT_POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "font-src 'self'",
        "connect-src 'self'",
        "manifest-src 'self'",
        "worker-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
_HEADERS: Final = {
    "content-security-policy": CONTENT_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


def secured(configured: Mapping[str, str], send: Send) -> Send:
    """Return a ``send`` that adds the headers to each answer that does not set them itself.

    Args:
        configured: Those of the web configuration, which come before ours.
    """
    wanted = {**_HEADERS, **{name.lower(): value for name, value in configured.items()}}

    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in wanted.items():
                headers.setdefault(name, value)
        await send(message)

    return send_with_headers


_LOCAL_NAMES: Final = frozenset({"localhost", "ip6-localhost", "ip6-loopback"})
_FOREIGN: Final = ("cross-site",)
_FOREIGN_TO_ACT: Final = ("cross-site", "same-site")


class Sites:
    """The names that this daemon is reached by.

    Args:
        names: Beside loopback, this node's name and the address at which a connection arrives.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        node = socket.gethostname().lower()
        self._names = _LOCAL_NAMES | {node, node.partition(".")[0]} | {name.lower() for name in names if name}

    def knows_host(self, scope: Scope) -> bool:
        """Return whether a request names this daemon in ``Host``; one without, as of HTTP/1.0, does."""
        host = Headers(scope=scope).get("host")
        if host is None:
            return True
        name = host_name(host)
        if name in self._names:
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        server = scope.get("server")
        return address.is_loopback or (
            server is not None and name == str(server[0]).partition("%")[0].lower()
        )

    def is_own(self, scope: Scope) -> bool:
        """Return whether a request is of the daemon's own page, or of no page at all."""
        headers = Headers(scope=scope)
        acts = scope["method"] not in ("GET", "HEAD")
        if headers.get("sec-fetch-site", "") in (_FOREIGN_TO_ACT if acts else _FOREIGN):
            return False
        origin = headers.get("origin")
        if origin is None:
            return True
        scheme, _, place = origin.partition("://")
        return scheme in ("http", "https") and place.lower() == headers.get("host", "").lower()


def is_on_loopback(scope: Scope) -> bool:
    """Return whether a request arrived at an address of loopback."""
    server = scope.get("server")
    try:
        return server is not None and ipaddress.ip_address(str(server[0]).partition("%")[0]).is_loopback
    except ValueError:
        return False


def host_name(host: str) -> str:
    """Return the name or address in a ``Host`` header, in lower case and without the port."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].removesuffix(".")


_MAX_REMEMBERED: Final = 64
_PASSWORD_BYTES: Final = 72
"""bcrypt uses no more bytes of a password than this."""


class BasicAuth:
    """Checks ``Authorization`` headers.

    A check takes bcrypt a tenth of a second of CPU on purpose. So it happens on a thread, one at a
    time, and what came of it is remembered: a scraper that comes back pays nothing.
    """

    def __init__(self) -> None:
        self._one_at_a_time = asyncio.Lock()
        self._known: OrderedDict[bytes, bool] = OrderedDict()
        # The cache must not reveal passwords to a reader of this process's memory.
        self._key = os.urandom(32)

    async def admits(self, header: str, users: Mapping[str, bytes]) -> bool:
        """Tell whether a header names one of these users with the right password.

        Args:
            header: The value of ``Authorization``; empty when there is none.
            users: bcrypt hashes by name; at least one.
        """
        credentials = parse_credentials(header)
        if credentials is None:
            return False
        name, password = credentials
        # The same work for an unknown name, so that timing does not reveal which names exist.
        known_hash = users.get(name, next(iter(users.values())))
        digest = hashlib.blake2b(name.encode() + b"\0" + known_hash + password, key=self._key).digest()
        if digest not in self._known:
            async with self._one_at_a_time:
                if digest not in self._known:
                    right = await asyncio.to_thread(_matches, password, known_hash)
                    self._remember(digest, right and name in users)
        self._known.move_to_end(digest)
        return self._known[digest]

    def _remember(self, digest: bytes, admitted: bool) -> None:
        self._known[digest] = admitted
        while len(self._known) > _MAX_REMEMBERED:
            # Guesses are forgotten first: they must not push out the scraper that is right.
            wrong = (old for old, right in self._known.items() if not right and old != digest)
            del self._known[next(wrong, next(iter(self._known)))]


def parse_credentials(header: str) -> tuple[str, bytes] | None:
    """Return name and password of a basic ``Authorization`` header, None when it is no such."""
    scheme, _, encoded = header.partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        name, colon, password = base64.b64decode(encoded.strip(), validate=True).partition(b":")
        return (name.decode(), password) if colon else None
    except (binascii.Error, ValueError):
        return None


def _matches(password: bytes, known_hash: bytes) -> bool:
    import bcrypt

    try:
        return bool(bcrypt.checkpw(password[:_PASSWORD_BYTES], known_hash))
    except ValueError:
        # No password that bcrypt takes, or no hash that it knows.
        return False


API: Final = "/api/"
LINKS: Final = "/links/"
MAX_BODY_BYTES: Final = 16 * 1024

_PROBES: Final = ("/-/healthy", "/-/ready")
"""Paths without a password, because a kubelet has none; they show only the daemon's state."""
_METRICS: Final = "/metrics"
"""A scraper on another node uses whatever name leads here. On loopback another name can only come from a page
of another site, whose name points here (DNS rebinding), or from a proxy, whose name is in ``page_hosts``."""


class Guard:
    """Checks every request before a route sees it."""

    def __init__(self, app: ASGIApp, web_config: WebConfigFile | None, sites: Sites) -> None:
        self._app = app
        self._web_config = web_config
        self._sites = sites
        self._auth = BasicAuth()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        config = self._web_config.current() if self._web_config is not None else None
        send = secured(config.headers if config is not None else {}, send)
        refusal = body_refusal(scope) or self._site_refusal(scope)
        if refusal is None and config is not None and config.users and scope["path"] not in _PROBES:
            header = Headers(scope=scope).get("authorization", "")
            if not await self._auth.admits(header, config.users):
                refusal = PlainTextResponse(
                    "not authorised\n", 401, {"www-authenticate": 'Basic realm="torchperfd"'}
                )
        await (refusal or self._app)(scope, receive, send)

    def _site_refusal(self, scope: Scope) -> Response | None:
        path = scope["path"]
        if path in _PROBES or (path == _METRICS and not is_on_loopback(scope)):
            return None
        if not self._sites.knows_host(scope):
            return error_response(
                421, "this daemon does not serve that host name", "name it in the option page_hosts"
            )
        if path.startswith((API, LINKS)) and not self._sites.is_own(scope):
            return error_response(403, "the request comes from another site", "use the daemon's own page")
        return None


def body_refusal(scope: Scope) -> Response | None:
    """Return the answer to a request with a body that nothing here takes; None for any other request."""
    headers = Headers(scope=scope)
    length = headers.get("content-length", "0")
    if length == "0" and "transfer-encoding" not in headers:
        return None
    if (
        scope["method"] == "POST"
        and scope["path"].startswith(API)
        and "transfer-encoding" not in headers
        and length.isdecimal()
        and int(length[:9]) <= MAX_BODY_BYTES
        and len(length) <= len(str(MAX_BODY_BYTES))
    ):
        return None
    # Unread, and the connection with it.
    return PlainTextResponse("no request here has such a body\n", 413, {"connection": "close"})


def error_response(status: int, problem: str, remedy: str = "") -> Response:
    """Return an error as the interface has it."""
    return JSONResponse({"error": {"problem": problem, "remedy": remedy}}, status)
