"""Which directories, files and processes may be trusted on a node that other users share.

Client and daemon meet at a socket in a directory, and below ``/tmp`` any user can make that directory first.
So a directory is examined before anything in it is opened, the kernel's record shows which user listens at
the socket, and files are opened below the directory's descriptor without following a link. A file that the
user has named is written with the same care.
"""

import errno
import os
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

from torchperfd.v1 import contract

SERVICE_USER: Final = "TORCHPERFD_SERVICE_USER"
"""Name or number of one more user whose daemon is trusted, besides root and this user."""

_CONNECT_S: Final = 0.5
_CREDENTIALS: Final = "=iII"  # struct ucred: pid, uid, gid


class UntrustedError(PermissionError):
    """A directory, file or process is in the hands of another user. ``str()`` is one line with the remedy."""


def may_others_write(status: os.stat_result) -> bool:
    """Return whether a file's or directory's mode lets its group or all users change it."""
    return bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def service_uid() -> int | None:
    """Return the user that ``TORCHPERFD_SERVICE_USER`` names; None when it names none that exists."""
    named = os.environ.get(SERVICE_USER, "")
    if not named:
        return None
    return int(named) if named.isascii() and named.isdecimal() else _uid_of(named)


@cache
def _uid_of(name: str) -> int | None:
    # Once: a directory service may take its time, and clients look for a daemon every two seconds.
    import pwd

    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        return None


def trusted_uids() -> frozenset[int]:
    """Return the users that can do us no more harm than they already can: root, this one, the service's."""
    service = service_uid()
    return frozenset({0, os.geteuid()} | ({service} if service is not None else set()))


def open_directory(path: str, *, create: bool = False) -> int:
    """Return a descriptor of the directory that holds a socket, for use as ``dir_fd``.

    Args:
        path: The directory. This user's own (``contract.user_runtime_dir``) has to be this user's alone.
        create: Make it, with mode 0700, when it is missing; its parents, too.

    Raises:
        UntrustedError: It is a link, or other users could have put something there.
        OSError: It is not there, or cannot be opened or made.
    """
    path = os.path.abspath(path)  # noqa: PTH100 - pathlib is not worth its import in a training process
    if create:
        _make_parents(os.path.dirname(path))  # noqa: PTH120
    _check_parent(path)
    if create:
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)  # noqa: PTH102
    flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        directory = os.open(path, flags)
    except OSError as error:
        if os.path.islink(path):  # noqa: PTH114
            raise UntrustedError(f"{path} is a link; {_remedy(path)}") from error
        raise
    try:
        _check_directory(path, os.fstat(directory))
    except BaseException:
        os.close(directory)
        raise
    return directory


@contextmanager
def opened_directory(path: str, *, create: bool = False) -> Iterator[int]:
    """Hold a directory open, as :func:`open_directory` returns it."""
    directory = open_directory(path, create=create)
    try:
        yield directory
    finally:
        os.close(directory)


def open_file(directory: int, name: str, flags: int, mode: int = 0o600) -> int:
    """Return a descriptor of this user's own regular file in an open directory.

    Args:
        directory: From :func:`open_directory`.
        name: A name without slashes.
        flags: As for ``os.open``; with ``O_CREAT`` it is made when missing.
        mode: Permission bits of a new file.

    Raises:
        UntrustedError: It is a link, no regular file, another user's, or has a second name elsewhere.
        OSError: It cannot be opened.
    """
    # Non-blocking, since opening a pipe could wait forever.
    flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        file = os.open(name, flags, mode, dir_fd=directory)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise UntrustedError(f"{name} is a link or no regular file; remove it") from error
        raise
    status = os.fstat(file)
    owners = (0, os.geteuid(), os.fstat(directory).st_uid)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1 or status.st_uid not in owners:
        os.close(file)
        raise UntrustedError(f"{name} is no regular file of user {os.geteuid()} alone; remove it")
    return file


def peer_uid(connection: socket.socket) -> int:
    """Return the user at the other end of a connected unix socket, as the kernel knows it.

    Raises:
        OSError: It is not connected.
    """
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize(_CREDENTIALS))
    return int(struct.unpack(_CREDENTIALS, raw)[1])


class Listener(NamedTuple):
    """A daemon's listening socket: its user, and its name at the other end of a connection."""

    uid: int
    name: object


def find_listener(path: str) -> Listener:
    """Return who listens at a socket, once the directory and the listener's user may be trusted.

    Raises:
        UntrustedError: The listener could be another user's process.
        OSError: Nothing accepts connections there.
    """
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise FileNotFoundError(errno.ENOENT, "no socket", path)
    os.close(open_directory(os.path.dirname(path)))  # noqa: PTH120
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_CONNECT_S)
        connection.connect(path)
        uid, name = peer_uid(connection), connection.getpeername()
    if uid not in trusted_uids() and uid != _system_owner(path):
        raise UntrustedError(
            f"user {uid} listens at {path}, not this user, root or the service's;"
            f" if that is your daemon, set {SERVICE_USER}={uid}"
        )
    return Listener(uid, name)


def _system_owner(path: str) -> int | None:
    """Return the user that root has given the directory of the node's service to, as systemd does.

    Only root can make a directory below one that is root's alone, so its owner is a user that root chose.
    """
    directory = os.path.dirname(path)  # noqa: PTH120
    if os.path.realpath(directory) != os.path.dirname(contract.SYSTEM_SOCKET):  # noqa: PTH120
        return None
    status, parent = os.lstat(directory), os.stat(os.path.dirname(directory))  # noqa: PTH116, PTH120
    if may_others_write(status) or may_others_write(parent) or not _is_roots(parent.st_uid):
        return None
    return status.st_uid


def _make_parents(path: str) -> None:
    if not os.path.isdir(path):  # noqa: PTH112
        os.makedirs(path, 0o700, exist_ok=True)  # noqa: PTH103


def _check_parent(path: str) -> None:
    """Refuse a parent in which other users could put another directory in the place of this one."""
    parent = os.path.dirname(path)  # noqa: PTH120
    status = os.stat(parent)  # noqa: PTH116
    if status.st_uid not in trusted_uids() and not _is_roots(status.st_uid):
        raise UntrustedError(f"{parent} belongs to user {status.st_uid}; {_remedy(path)}")
    if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        raise UntrustedError(f"all users may rename what is in {parent}; {_remedy(path)}")


def _check_directory(path: str, status: os.stat_result) -> None:
    own = status.st_uid == os.geteuid()
    private = path == os.path.abspath(contract.user_runtime_dir())  # noqa: PTH100
    if private and not own:
        raise UntrustedError(f"{path} belongs to user {status.st_uid}; {_remedy(path)}")
    # Root's directories that all may write to are root's choice, like /tmp; there the listener's user is
    # checked.
    if own and may_others_write(status) and (private or status.st_uid != 0):
        raise UntrustedError(f"other users may write to {path}; `chmod 700 {path}` once it is empty")
    if own or status.st_uid in trusted_uids() or _is_roots(status.st_uid):
        return
    if _system_owner(f"{path}/socket") != status.st_uid:
        raise UntrustedError(f"{path} belongs to user {status.st_uid}; {_remedy(path)}")


def _remedy(path: str) -> str:
    if path == os.path.abspath(contract.user_runtime_dir()):  # noqa: PTH100
        return "set XDG_RUNTIME_DIR to a directory of your own"
    return "choose a socket in a directory of your own or root's"


def _is_roots(uid: int) -> bool:
    """Return whether a file's owner is root, also where a user namespace does not map root."""
    if uid == 0:
        return True
    try:
        with open("/proc/sys/kernel/overflowuid", "rb") as file:  # noqa: PTH123
            overflow = int(file.read())
        with open("/proc/self/uid_map", "rb") as file:  # noqa: PTH123
            mapped = [line.split() for line in file.read().splitlines()]
    except (OSError, ValueError):
        return False
    # Of all users that are not mapped here, only root can have made what leads to the directories in use.
    return uid == overflow and [int(count) for _, _, count in mapped] != [2**32 - 1]


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
    part = f".{os.urandom(8).hex()}.part"
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
