"""The handover: training processes hand the files of captures over as open descriptors.

Files of a rank's capture are taken from these into the daemon's own directory.
"""

import asyncio
import contextlib
import errno
import logging
import os
import re
import secrets
import socket
import stat
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec
from google.protobuf.message import DecodeError

from torchperfd.v1 import contract, session_pb2
from torchperfd.v1.contract import CAPTURE_ID
from torchperfd_daemon.captures import folder
from torchperfd_daemon.captures.catalog import Catalog
from torchperfd_daemon.captures.manifest import CaptureRecord, RankManifest
from torchperfd_daemon.errors import DiskFullError, NotAllowedError, TorchperfdError, UsageError, explained
from torchperfd_daemon.rpc.callers import Caller, UserLimit
from torchperfd_daemon.service.permissions import AuditLine
from torchperfd_daemon.text import LogLimiter
from torchperfd_daemon.untrusted_files import DamagedError, decode_clean

MAX_FILES: Final = 4
_NAME: Final = re.compile(r"rank(\d{1,9})\.(json|memory\.pickle|memory\.txt|manifest\.json)")
_MANIFEST: Final = "manifest.json"
_MAX_MANIFEST_BYTES: Final = 1 << 20
_COPY_BYTES: Final = 16 << 20
_NEW_FILE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Sender:
    """A rank that hands files over.

    Attributes:
        run: Its run's name on this node.
        uid: Its process's user, as the kernel knows it.
    """

    run: str
    rank: int
    uid: int


def take(catalog: Catalog, capture_id: str, sender: Sender, files: Mapping[str, int]) -> None:
    """Copy files of a rank into the folder of its capture.

    The capture is one that this rank takes part in. If there is none of this id, the rank's script makes it.

    Args:
        files: Open descriptors by the files' names. They stay open.

    Raises:
        NotAllowedError: The rank takes no part in the capture.
        UsageError: The files are not those of a rank.
        TorchperfdError: They cannot be kept; the message has the reason.
    """
    if not CAPTURE_ID.fullmatch(capture_id):
        raise UsageError(f"{capture_id[:80]!r} is no capture id")
    if not 0 < len(files) <= MAX_FILES:
        raise UsageError(f"a rank hands over 1 to {MAX_FILES} files")
    for name in files:
        match = _NAME.fullmatch(name)
        if match is None or int(match[1]) != sender.rank:
            raise UsageError(f"{name[:80]!r} is no file of rank {sender.rank}")
    record = _record(catalog, capture_id, sender)
    most = catalog.quota.capture_bytes
    limit = most // max(1, len(record.ranks)) if record is not None else most
    for name, descriptor in files.items():
        _check(name, descriptor, limit)
    if record is None:
        catalog.create(capture_id)
    path = catalog.folder(capture_id)
    with explained(f"cannot write to {path}"), folder.opened(path) as held:
        if catalog.lacking():
            raise DiskFullError(f"the disk of {catalog.directory} has less left than must stay free")
        for name, descriptor in files.items():
            if name.endswith(_MANIFEST):
                folder.write(held, name, _signed(name, descriptor, sender))
            else:
                _copy(held, name, descriptor, sender)


def _record(catalog: Catalog, capture_id: str, sender: Sender) -> CaptureRecord | None:
    """Return the capture that a rank takes part in; None if there is none of this id."""
    found = catalog.found(capture_id)
    if found is None:
        return None
    record = found.record
    takes_part = record is not None and record.run == sender.run
    if (
        record is None
        or not takes_part
        or (sender.rank, sender.uid) not in [(trace.rank, trace.uid) for trace in record.ranks]
    ):
        raise NotAllowedError(f"rank {sender.rank} of run {sender.run} takes no part in capture {capture_id}")
    if found.closed:
        raise TorchperfdError(f"capture {capture_id} has ended")
    return record


def _check(name: str, descriptor: int, limit: int) -> None:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise UsageError(f"{name} is no regular file")
    if name.endswith(_MANIFEST):
        limit = _MAX_MANIFEST_BYTES
    if limit and status.st_size > limit:
        raise TorchperfdError(
            f"{name} has {status.st_size:,} bytes, {limit:,} are allowed",
            "capture fewer steps or raise --captures-max-bytes-each",
        )


def _signed(name: str, descriptor: int, sender: Sender) -> bytes:
    """Return a rank's manifest with its user, as the kernel knows it."""
    content = os.pread(descriptor, _MAX_MANIFEST_BYTES, 0)
    try:
        known = decode_clean(content, RankManifest)
        document = msgspec.json.decode(content)
    except (DamagedError, msgspec.DecodeError) as error:
        raise UsageError(f"{name} is no manifest: {error}") from error
    if known.rank != sender.rank:
        raise UsageError(f"{name} is of rank {known.rank}")
    document |= {"uid": sender.uid, "run": sender.run}
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"


def _copy(held: int, name: str, descriptor: int, sender: Sender) -> None:
    size = os.fstat(descriptor).st_size
    part = f".{name}.{secrets.token_hex(8)}"
    copy = os.open(part, _NEW_FILE, folder.FILE_MODE, dir_fd=held)
    try:
        offset = 0
        while offset < size:
            sent = os.sendfile(copy, descriptor, offset, min(_COPY_BYTES, size - offset))
            if not sent:
                raise TorchperfdError(f"{name} became shorter while it was copied")
            offset += sent
        if folder.may_act_for_users():
            # The analyser reads it as this user.
            os.fchown(copy, sender.uid, -1)
        os.rename(part, name, src_dir_fd=held, dst_dir_fd=held)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFullError("the disk of the daemon's captures is full") from error
        raise
    finally:
        os.close(copy)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part, dir_fd=held)


log = logging.getLogger("torchperfd.captures")

_AT_ONCE: Final = 2
"""Connections of one user that are served at the same time; the others wait."""
_MAX_OF_USER: Final = 256
_MAX_OF_ALL: Final = 1024
_MESSAGE_S: Final = 10.0
_MAX_MESSAGE_BYTES: Final = 1 << 14
_HEAD_BYTES: Final = 4


class CaptureHandovers:
    """Serves the connections that hand files of captures over.

    Args:
        find: Returns the rank whose session has a token and a caller's user; None where there is none.
    """

    def __init__(self, catalog: Catalog, find: Callable[[str, Caller], Sender | None]) -> None:
        self._catalog = catalog
        self._find = find
        self._limit = UserLimit("captures being handed over", _MAX_OF_USER, _MAX_OF_ALL)
        self._limiter = LogLimiter(log)
        self._turns: defaultdict[int | None, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(_AT_ONCE)
        )
        self._tasks: set[asyncio.Task[None]] = set()

    def accept(self, connection: socket.socket, caller: Caller) -> None:
        """Serve a connection that has sent the greeting; takes the socket over."""
        refused = self._limit.admit(caller.uid)
        if refused:
            connection.close()
            self._limiter.warning("a handover of %s is refused: %s", caller, refused)
            return
        task = asyncio.get_running_loop().create_task(self._serve(connection, caller))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """Serve no more connections."""
        for task in self._tasks:
            task.cancel()

    async def _serve(self, connection: socket.socket, caller: Caller) -> None:
        try:
            async with self._turns[caller.uid]:
                await _in_thread(lambda: self._receive(connection, caller))
        finally:
            connection.close()
            self._limit.dismiss(caller.uid)

    def _receive(self, connection: socket.socket, caller: Caller) -> None:
        answer = session_pb2.CaptureHandoverResult()
        descriptors: list[int] = []
        try:
            connection.settimeout(_MESSAGE_S)
            connection.sendall(contract.HANDOVER_READY)
            message = _message(connection, descriptors)
            sender = self._find(message.token, caller)
            if sender is None:
                answer.reason = "the daemon has no session of this process"
                answer.unknown_session = True
            else:
                self._take(message, sender, descriptors, caller)
        except TorchperfdError as error:
            answer.reason = str(error)
        except (OSError, DecodeError) as error:
            answer.reason = f"it was not received: {error}"
        except Exception:
            log.exception("files of a capture were not taken over")
            answer.reason = "internal error; see the daemon's log"
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        if answer.reason:
            self._limiter.warning("files of a capture of %s are not taken over: %s", caller, answer.reason)
        content = answer.SerializeToString()
        with contextlib.suppress(OSError):
            connection.sendall(len(content).to_bytes(_HEAD_BYTES, "big") + content)

    def _take(
        self, message: session_pb2.CaptureHandover, sender: Sender, descriptors: list[int], caller: Caller
    ) -> None:
        if len(descriptors) != len(message.files) or len(set(message.files)) != len(message.files):
            raise TorchperfdError("there is not one descriptor for each file")
        with AuditLine("handover", f"rank {sender.rank} of run {sender.run}", caller) as line:
            files = dict(zip(message.files, descriptors, strict=True))
            take(self._catalog, message.capture_id, sender, files)
            line.allowed([sender.uid], message.capture_id)


def _message(connection: socket.socket, descriptors: list[int]) -> session_pb2.CaptureHandover:
    """Receive the message, and the descriptors that come with it."""
    head, received, _, _ = socket.recv_fds(
        connection, _HEAD_BYTES, MAX_FILES, socket.MSG_CMSG_CLOEXEC | socket.MSG_WAITALL
    )
    descriptors.extend(received)
    length = int.from_bytes(head, "big")
    if len(head) != _HEAD_BYTES or length > _MAX_MESSAGE_BYTES:
        raise ConnectionError("the message is not of the expected form")
    content = b""
    while len(content) < length:
        piece = connection.recv(length - len(content))
        if not piece:
            raise ConnectionError("the process has left")
        content += piece
    return session_pb2.CaptureHandover.FromString(content)


async def _in_thread(work: Callable[[], None]) -> None:
    """Run work on a thread of its own, which the process does not wait for when it ends."""
    loop = asyncio.get_running_loop()
    done = asyncio.Event()

    def run() -> None:
        try:
            work()
        finally:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(done.set)

    threading.Thread(target=run, name="torchperfd-handover", daemon=True).start()
    await done.wait()
