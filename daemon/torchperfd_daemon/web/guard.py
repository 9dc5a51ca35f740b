"""Lets requests through that this daemon serves: by their body, site and user."""

from typing import Final

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from torchperfd_daemon.web.basic_auth import BasicAuth
from torchperfd_daemon.web.config_file import WebConfigFile
from torchperfd_daemon.web.headers import secured
from torchperfd_daemon.web.origin import Sites, is_on_loopback

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
