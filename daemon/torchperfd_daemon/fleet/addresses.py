"""Addresses of the fleet's daemons; may be Slurm's hostlists, such as ``node[01-10,12],gpu-[1-2]-[3-4]``."""

import ipaddress
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from torchperfd_daemon.errors import UsageError

DEFAULT_PORT: Final = 9408
_HOST: Final = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9_.])?")
_PORT: Final = re.compile(r"[0-9]{1,5}")


@dataclass(frozen=True, slots=True, order=True)
class Address:
    """A host, by name or number, and a TCP port.

    Attributes:
        certified_name: The name that the peer's certificate has to contain; the host if empty.
    """

    host: str
    port: int
    certified_name: str = field(default="", compare=False)

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
        raise _malformed_address(text)
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            raise _malformed_address(text) from None
    elif _HOST.fullmatch(host) is None:
        raise _malformed_address(text)
    return Address(host, int(port))


def parse_port(text: str) -> int:
    """Read the number of a TCP port.

    Raises:
        UsageError: It is not a port number.
    """
    if _PORT.fullmatch(text) is None or not 0 < int(text) <= 65535:
        raise UsageError(f"{text[:40]!r} is not a TCP port", f"write it like {DEFAULT_PORT}")
    return int(text)


def _malformed_address(text: str) -> UsageError:
    return UsageError(f"{text[:60]!r} is not HOST:PORT", f"write it like node1:{DEFAULT_PORT}")


_ELEMENT: Final = re.compile(r"(?:[A-Za-z0-9._-]|\[[0-9,-]+\])+")
_PART: Final = re.compile(r"\[([^\]]*)\]|([^\[\]]+)")
_RANGE: Final = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


def expand_hostlist(text: str, most: int = 10_000) -> list[str]:
    """Return the host names of a hostlist, in Slurm's order: of several brackets, the last varies fastest.

    A range keeps the width of its first number, so that ``[08-10]`` is 08, 09, 10. The form is that of
    ``scontrol show hostnames``.

    Raises:
        UsageError: It is no hostlist, or names more hosts.
    """
    names: list[str] = []
    for element in _elements(text):
        if _ELEMENT.fullmatch(element) is None:
            raise _malformed_hostlist(element)
        parts = [
            list(_numbers(match[1], most)) if match[1] is not None else [match[2]]
            for match in _PART.finditer(element)
        ]
        product = map("".join, itertools.product(*parts))
        names.extend(itertools.islice(product, most + 1 - len(names)))
        if len(names) > most:
            raise UsageError(f"the hostlist {text[:40]!r} names more than {most:,} hosts")
    return names


def _elements(text: str) -> Iterator[str]:
    """Split at the commas outside of brackets."""
    start = depth = 0
    for position, character in enumerate(text):
        depth += (character == "[") - (character == "]")
        if character == "," and not depth:
            yield text[start:position]
            start = position + 1
    yield text[start:]


def _numbers(text: str, most: int) -> Iterator[str]:
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise _malformed_hostlist(f"[{text}]")
        first, final = int(match[1]), int(match[2] or match[1])
        if final < first:
            raise _malformed_hostlist(f"[{text}]")
        # One beyond the limit is enough to refuse the list.
        for number in range(first, min(final, first + most) + 1):
            yield str(number).zfill(len(match[1]))


def _malformed_hostlist(text: str) -> UsageError:
    return UsageError(
        f"{text[:40]!r} is not a Slurm hostlist", "write it like node[01-10,12],gpu-[1-2]-[3-4]"
    )
