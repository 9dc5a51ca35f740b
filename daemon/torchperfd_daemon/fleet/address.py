"""The address of a daemon of the fleet."""

import ipaddress
import re
from dataclasses import dataclass
from typing import Final

from torchperfd_daemon.errors import UsageError

DEFAULT_PORT: Final = 9408
_HOST: Final = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9_.])?")
_PORT: Final = re.compile(r"[0-9]{1,5}")


@dataclass(frozen=True, slots=True, order=True)
class Address:
    """A host, by name or number, and a TCP port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only this node can reach it; of names, only ``localhost`` is trusted to be so."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


def parse_address(text: str) -> Address:
    """Read ``host:port``; an IPv6 address is in brackets.

    Raises:
        UsageError: It is malformed.
    """
    host, _, port = text.rpartition(":")
    if _PORT.fullmatch(port) is None or int(port) > 65535:
        raise _malformed(text)
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            raise _malformed(text) from None
    elif _HOST.fullmatch(host) is None:
        raise _malformed(text)
    return Address(host, int(port))


def parse_port(text: str) -> int:
    """Read the number of a TCP port.

    Raises:
        UsageError: It is not a port number.
    """
    if _PORT.fullmatch(text) is None or not 0 < int(text) <= 65535:
        raise UsageError(f"{text[:40]!r} is not a TCP port", f"write it like {DEFAULT_PORT}")
    return int(text)


def _malformed(text: str) -> UsageError:
    return UsageError(f"{text[:60]!r} is not HOST:PORT", f"write it like node1:{DEFAULT_PORT}")
