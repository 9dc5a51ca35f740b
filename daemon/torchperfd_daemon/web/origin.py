"""Which sites' requests are served: a foreign page in a browser must not reach the daemon through it.

Such a page can send requests to any address, and can have its own name point at the daemon (DNS rebinding).
A browser cannot forge ``Host`` and ``Origin``, so they show both.
"""

import ipaddress
import socket
from collections.abc import Iterable
from typing import Final

from starlette.datastructures import Headers
from starlette.types import Scope

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
