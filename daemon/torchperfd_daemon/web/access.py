"""Access over HTTP: the page's token, and links that work without it for one minute."""

import contextlib
import hmac
import os
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Final, Generic, TypeVar

from starlette.datastructures import Headers

from torchperfd.v1 import access
from torchperfd_daemon.errors import TorchperfdError
from torchperfd_daemon.service.permissions import LocalCall, owner_rights, stranger_rights

TOKEN_FILE: Final = "page.token"
HEADER: Final = "x-torchperfd-token"


class Access(Enum):
    """What a request may do."""

    OWNER = "owner"
    """The token's holder: everything that the daemon's own user may."""
    STRANGER = "stranger"
    """No token: what any user of the node may see."""
    REFUSED = "refused"
    """A token, and the wrong one."""

    def call(self) -> LocalCall:
        """Return a call of the control service with these rights."""
        return LocalCall(owner_rights() if self is Access.OWNER else stranger_rights())


class PageToken:
    """A secret that the daemon makes at its start.

    Args:
        secret: By default a new one.
    """

    def __init__(self, secret: str = "") -> None:
        self._secret = secret or secrets.token_urlsafe(32)

    def access_of(self, headers: Headers) -> Access:
        """Return what the sender of a request may do."""
        given = headers.get(HEADER)
        if given is None:
            scheme, _, credentials = headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer":
                # None, or a name and a password, which the web configuration is about.
                return Access.STRANGER
            given = credentials
        right = hmac.compare_digest(given.strip().encode(), self._secret.encode())
        return Access.OWNER if right else Access.REFUSED

    def store(self, socket: str) -> Path:
        """Write the secret beside the daemon's socket, for the user of the daemon alone.

        Returns:
            The file.

        Raises:
            TorchperfdError: It cannot be written, or another user has put something in its place.
        """
        path = token_path(socket)
        try:
            directory = access.open_directory(str(path.parent))
            try:
                # A file of an earlier daemon is replaced rather than written into: it may be open elsewhere.
                part = f".{path.name}.{secrets.token_hex(8)}"
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
                with open(access.open_file(directory, part, flags, 0o600), "wb") as file:  # noqa: PTH123
                    file.write(self._secret.encode() + b"\n")
                os.replace(part, path.name, src_dir_fd=directory, dst_dir_fd=directory)
            finally:
                os.close(directory)
        except OSError as error:
            raise TorchperfdError(
                f"cannot write {path}: {error.strerror or error}", "choose another path with --socket"
            ) from error
        return path


def token_path(socket: str) -> Path:
    """Return where the daemon with a socket keeps its token: beside it, under its name if that is another."""
    path = Path(socket)
    return path.with_name(TOKEN_FILE if path.name == "daemon.sock" else f"{path.name}.{TOKEN_FILE}")


def remove_token(socket: str) -> None:
    """Remove the token of a daemon that stops."""
    path = token_path(socket)
    with contextlib.suppress(OSError):
        directory = access.open_directory(str(path.parent))
        try:
            os.unlink(path.name, dir_fd=directory)
        finally:
            os.close(directory)


def read_token(socket: str) -> str:
    """Return the token of the daemon with a socket.

    Raises:
        TorchperfdError: There is none, or this user may not read it.
    """
    path = token_path(socket)
    try:
        directory = access.open_directory(str(path.parent))
        try:
            with open(access.open_file(directory, path.name, os.O_RDONLY), "rb") as file:  # noqa: PTH123
                return file.read(256).decode("ascii").strip()
        finally:
            os.close(directory)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise TorchperfdError(
            f"cannot read the page's token in {path}: {reason}", "ask the user who runs the daemon"
        ) from error


T = TypeVar("T")

LINK_S: Final = 60.0
_MAX_LINKS: Final = 64


class Links(Generic[T]):
    """Keys that cannot be guessed, each for one thing and for a minute; of too many the oldest is dropped."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._links: OrderedDict[str, tuple[float, T]] = OrderedDict()

    def add(self, target: T) -> str:
        """Return the path of a new link to something."""
        while len(self._links) >= _MAX_LINKS:
            self._links.popitem(last=False)
        key = secrets.token_urlsafe(24)
        self._links[key] = self._clock() + LINK_S, target
        return f"/links/{key}"

    def find(self, key: str) -> T | None:
        """Return what a link leads to; None once its minute is over."""
        until, target = self._links.get(key, (0.0, None))
        return target if self._clock() < until else None
