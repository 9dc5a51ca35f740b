"""One capture's folder: its names, and how it is read although everybody may write there.

The training processes of all users write into a capture's folder, so it is open to them
like /tmp, sticky bit included. Whatever lies in there is therefore hostile until read: a link
planted under the manifest's name must lead neither the daemon's writes nor anyone's reads
to another file. Hence no name is opened through a link, all are opened below the descriptor of
the folder, and what is made has a random name first.
"""

import calendar
import contextlib
import os
import re
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from torchperfd_daemon.captures import manifest
from torchperfd_daemon.captures.manifest import (
    CaptureRecord,
    CaptureState,
    first_reason,
    overall_state,
)

MODE: Final = 0o1777
PIN: Final = ".pinned"
"""A file of this name keeps a capture from being removed."""

UNFINISHED_S: Final = 25 * 3600.0
"""For so long after its last change a folder that no daemon has closed may still be in progress:
a capture waits for its steps for a day at most."""

_ID: Final = re.compile(r"[0-9A-Za-z][0-9A-Za-z_-]{0,79}")
_OWN_ID: Final = re.compile(r"([0-9]{8}-[0-9]{6})-[0-9a-f]{6}")
_FILE: Final = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,99}")
_RANK_MANIFEST: Final = re.compile(r"rank\d{1,9}\.manifest\.json")
_MOST_MANIFEST_BYTES: Final = 1024 * 1024
_GIVEN_UP: Final = "it was never finished"
_BLOCK_BYTES: Final = 512  # the unit of st_blocks, whatever the file system's own is


@dataclass(frozen=True, slots=True)
class Found:
    """What a folder was found to hold.

    Attributes:
        record: The capture; None when the folder holds none.
        bytes: What its files take on the disk.
        pinned: It must be kept.
        closed: Its daemon has written that it ended; nothing is added any more.
        changed_ns: When the folder last changed, Unix time in nanoseconds.
    """

    record: CaptureRecord | None
    bytes: int
    pinned: bool
    closed: bool
    changed_ns: int

    def in_progress(self, now: float) -> bool:
        """Return whether somebody may still be writing, at Unix time ``now``."""
        return not self.closed and now < self.changed_ns / 1e9 + UNFINISHED_S


def is_id(name: str) -> bool:
    """Return whether a capture can have this name: it leads nowhere out of the directory."""
    return _ID.fullmatch(name) is not None


def is_file_name(name: str) -> bool:
    """Return whether a capture's file can have this name: plain, visible, of one part."""
    return _FILE.fullmatch(name) is not None


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    """Hold a folder open, so that it stays the same one whatever becomes of its name.

    Raises:
        OSError: It is not there, is no folder, or is a link to one.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    parent = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        descriptor = os.open(path.name, flags, dir_fd=parent)
    finally:
        os.close(parent)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def open_file(folder: int, name: str) -> int:
    """Return a descriptor of a regular file in an open folder; the caller closes it.

    Raises:
        OSError: It cannot be read, or is something else.
    """
    # Non-blocking, since opening a pipe that nobody writes to would wait forever.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(name, flags, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{name} is no regular file")
    return descriptor


def read(path: Path, now: float) -> Found | None:
    """Return what a folder holds at Unix time ``now``; None when there is no such folder."""
    try:
        with opened(path) as folder:
            changed_ns = os.fstat(folder).st_mtime_ns
            names, size = _measure(folder)
            record, closed = _record(folder, path.name, names, now, changed_ns)
            return Found(record, size, PIN in names, closed, changed_ns)
    except OSError:
        return None


def _measure(folder: int) -> tuple[set[str], int]:
    """Return the names in a folder, and the bytes that they take on the disk."""
    names, blocks = set(), 0
    with os.scandir(folder) as entries:
        for entry in entries:
            names.add(entry.name)
            # Not what a file claims to have: one full of holes would push out all other captures.
            with contextlib.suppress(OSError):
                blocks += entry.stat(follow_symlinks=False).st_blocks
    return names, blocks * _BLOCK_BYTES


def _record(
    folder: int, capture_id: str, names: set[str], now: float, changed_ns: int
) -> tuple[CaptureRecord | None, bool]:
    """Return the capture, and whether its daemon has closed it."""
    given_up = now >= changed_ns / 1e9 + UNFINISHED_S
    with contextlib.suppress(OSError, RecursionError, msgspec.MsgspecError):
        record = manifest.decode(_content(folder, manifest.FILE_NAME)[0])
        record.capture_id = capture_id
        closed = record.state.ended
        if given_up and not closed:
            record.state, record.reason = CaptureState.FAILED, _GIVEN_UP
        return record, closed
    by_ranks = _from_rank_manifests(folder, capture_id, names)
    return by_ranks or _unfinished(capture_id, given_up=given_up), False


def _content(folder: int, name: str) -> tuple[bytes, float]:
    """Return a small regular file's content and when it was written.

    Raises:
        OSError: It cannot be read, or is something else.
    """
    with open(open_file(folder, name), "rb") as file:
        written_at = os.fstat(file.fileno()).st_mtime
        content = file.read(_MOST_MANIFEST_BYTES + 1)
    if len(content) > _MOST_MANIFEST_BYTES:
        raise OSError(f"{name} has more than {_MOST_MANIFEST_BYTES} bytes")
    return content, written_at


def _from_rank_manifests(folder: int, capture_id: str, names: set[str]) -> CaptureRecord | None:
    """Put a record together from what the ranks wrote: a capture that no daemon took part in."""
    record = None
    for name in sorted(filter(_RANK_MANIFEST.fullmatch, names)):
        try:
            content, written_at = _content(folder, name)
            found = manifest.decode_rank(content)
        except (OSError, RecursionError, msgspec.MsgspecError):
            continue
        if record is None:
            record = CaptureRecord(
                capture_id=capture_id,
                run=found.run,
                trigger="script",
                requested_at=min(max(0.0, written_at), manifest.LATEST),
                step_range=found.step_range,
                options=found.options,
            )
        record.ranks.append(found.trace())
    if record is not None:
        record.ranks.sort(key=lambda trace: trace.rank)
        record.state = overall_state(record.ranks)
        record.reason = first_reason(record.ranks)
    return record


def _unfinished(capture_id: str, *, given_up: bool) -> CaptureRecord | None:
    """Return the record of a folder that bears a name of ours and holds no manifest (yet)."""
    match = _OWN_ID.fullmatch(capture_id)
    if match is None:
        return None
    try:
        asked_at = calendar.timegm(time.strptime(match[1], "%Y%m%d-%H%M%S"))
    except ValueError:
        return None
    return CaptureRecord(
        capture_id=capture_id,
        run="",
        trigger="command",
        requested_at=max(0.0, float(asked_at)),
        state=CaptureState.FAILED if given_up else CaptureState.PREPARING,
        reason=_GIVEN_UP if given_up else "",
    )
