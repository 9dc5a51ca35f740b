"""The intake: takes files of a rank's capture from open descriptors into the daemon's own directory.

A training process hands over descriptors of files that it has written wherever it can. The daemon copies
them: no other process ever has the copies open, so that they stay what was checked, and no other user needs
access to the daemon's directory. The kernel copies, so that a trace of any size takes no memory here.
"""

import contextlib
import errno
import os
import re
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from torchperfd.v1.contract import CAPTURE_ID
from torchperfd_daemon.captures import folder
from torchperfd_daemon.captures.catalog import Catalog
from torchperfd_daemon.captures.manifest import CaptureRecord, RankManifest
from torchperfd_daemon.documents import DamagedError, decode_clean
from torchperfd_daemon.errors import DiskFullError, NotAllowedError, TorchperfdError, UsageError, explained

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
    """Return the capture that a rank takes part in; None if there is none of this id.

    Raises:
        NotAllowedError: The rank takes no part in it.
        TorchperfdError: It has ended.
    """
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
    """Copy a file into an open folder, whole or not at all."""
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
