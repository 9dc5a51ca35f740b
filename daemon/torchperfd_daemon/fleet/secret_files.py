"""Reads the files of secrets and certificates by which a daemon or a command authenticates itself."""

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from torchperfd_daemon.errors import TorchperfdError, explained

MAX_FILE_BYTES: Final = 2**20
_SHARED_MODE: Final = 0o640
"""Of a secret of root's that a service may read by its group."""


def read_file(path: Path, remedy: str, *, secret: bool = False) -> bytes:
    """Return the content of a file of credentials.

    Args:
        remedy: What to do about a file that cannot be used, for the message.
        secret: Refuse a file that other users can read or replace.

    Raises:
        TorchperfdError: It cannot be read, is no regular file or too large, or is a secret that others know.
    """
    # Non-blocking, since opening a pipe without a writer would wait forever. Links are followed:
    # Kubernetes mounts a secret as links.
    with (
        explained(f"cannot read {path}", remedy),
        _explained_secret(path) if secret else contextlib.nullcontext(),
        open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file,  # noqa: PTH123
    ):
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise TorchperfdError(f"{path} is not a regular file", remedy)
        if secret:
            _check_secret(path, status)
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise TorchperfdError(f"{path} has more than {MAX_FILE_BYTES:,} bytes", remedy)
    return content


@contextlib.contextmanager
def _explained_secret(path: Path) -> Iterator[None]:
    """Say how root gives a secret to this process where only root may read it."""
    try:
        yield
    except PermissionError as error:
        raise TorchperfdError(f"cannot read {path}: {error.strerror}", _shared_by_root(path)) from error


def _shared_by_root(path: Path) -> str:
    return f"as root: `chgrp {os.getegid()} {path} && chmod 640 {path}`"


def _check_secret(path: Path, status: os.stat_result) -> None:
    """Refuse a secret that other users can read or replace.

    A file of root's may be readable for a group of this daemon's: that is how root gives it to a service.

    Raises:
        TorchperfdError: They can.
    """
    user = os.geteuid()
    if status.st_uid not in (0, user):
        raise TorchperfdError(f"{path} belongs to user {status.st_uid}", f"`chown {user} {path}`")
    allowed = stat.S_IRWXU
    if status.st_uid == 0 != user and status.st_gid in (os.getegid(), *os.getgroups()):
        allowed |= stat.S_IRGRP
    if stat.S_IMODE(status.st_mode) & (stat.S_IRWXG | stat.S_IRWXO) & ~allowed:
        remedy = f"`chmod 600 {path}`"
        if status.st_uid == 0 != user:
            remedy = _shared_by_root(path)
        elif user == 0 != status.st_gid and stat.S_IMODE(status.st_mode) == _SHARED_MODE:
            remedy = f"run this as the daemon's user, whose group may read it, or {remedy}"
        raise TorchperfdError(f"users other than its owner can use {path}", remedy)
