"""Writing a file that the user has named, in a directory that other users may write, too."""

import errno
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

from torchperfd.v1.access import UntrustedError

_CANNOT_REPLACE: Final = (errno.EACCES, errno.EPERM, errno.EBUSY, errno.EROFS)


def write_file(path: Path, content: bytes) -> None:
    """Write a file that the user has named: beside it, and renamed, so that it is there whole or not at all.

    A link there is followed if it is this user's or root's. What another user has put there never gets the
    content, and is never waited for. A device or a pipe of this user's or root's is written to.

    Raises:
        UntrustedError: Another user has put something there that cannot be replaced.
        OSError: It cannot be written; a pipe without a reader is such a case.
    """
    is_link = False
    with suppress(FileNotFoundError):
        status = path.lstat()
        is_link = stat.S_ISLNK(status.st_mode)
        if is_link:
            _check_owner(path, "link", status)
            status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            _write_in_place(path, content, is_link=is_link)
            return
    if is_link:
        path = path.resolve()
    try:
        _replace(path, content)
    except OSError as error:
        # A read-only directory, a file that is mounted, or another user's in a directory like /tmp.
        if error.errno not in _CANNOT_REPLACE or not path.exists():
            raise
        _write_in_place(path, content, is_link=False)


def _replace(path: Path, content: bytes) -> None:
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    part = f".{secrets.token_hex(8)}.part"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        file = os.open(part, flags, 0o666, dir_fd=directory)
        try:
            with os.fdopen(file, "wb") as out:
                with suppress(FileNotFoundError):
                    before = os.stat(path.name, dir_fd=directory, follow_symlinks=False)
                    if before.st_uid == os.geteuid():
                        os.fchmod(file, stat.S_IMODE(before.st_mode))
                out.write(content)
            os.replace(part, path.name, src_dir_fd=directory, dst_dir_fd=directory)
        except BaseException:
            with suppress(OSError):
                os.unlink(part, dir_fd=directory)
            raise
    finally:
        os.close(directory)


def _write_in_place(path: Path, content: bytes, *, is_link: bool) -> None:
    # Non-blocking, since opening a pipe could wait forever.
    flags = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if is_link else os.O_NOFOLLOW)
    file = os.open(path, flags)
    with os.fdopen(file, "wb") as out:
        status = os.fstat(file)
        # A link such as /dev/stdout was checked. With sudo, the pipe or terminal behind it is another user's.
        if not is_link or stat.S_ISREG(status.st_mode):
            _check_owner(path, "file", status)
        if stat.S_ISREG(status.st_mode):
            os.truncate(file, 0)
        os.set_blocking(file, True)
        out.write(content)


def _check_owner(path: Path, kind: str, status: os.stat_result) -> None:
    if status.st_uid not in (0, os.geteuid()):
        raise UntrustedError(f"{path} is a {kind} of user {status.st_uid}; choose another file")
