"""The captures directory: one folder per capture, readable without a running daemon."""

import contextlib
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from torchperfd_daemon.captures import manifest
from torchperfd_daemon.captures.manifest import CaptureRecord, CaptureState, RankTrace
from torchperfd_daemon.errors import NoSuchTargetError, TorchperfdError

_ID: Final = re.compile(r"[0-9A-Za-z][0-9A-Za-z_-]{0,79}")
_RANK_MANIFEST: Final = re.compile(r"rank\d{1,9}\.manifest\.json")
_MOST_MANIFEST_BYTES: Final = 1024 * 1024

# The training processes of all users write into a capture's folder, so it is open to them
# like /tmp, sticky bit included. Whatever lies in there is therefore hostile until read: a link
# planted under the manifest's name must lead neither the daemon's writes nor anyone's reads
# to another file. Hence no name is opened through a link, and what is made has a random one first.
_FOLDER_MODE: Final = 0o1777


class Catalog:
    """Reads and writes the captures directory.

    Args:
        directory: Made when first needed.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def folder(self, capture_id: str) -> Path:
        """Return where a capture lives, whether or not it exists.

        Raises:
            NoSuchTargetError: The id could not be one: it might lead out of the directory.
        """
        if not _ID.fullmatch(capture_id):
            raise NoSuchTargetError(
                f"{capture_id[:80]!r} is no capture id", "list them with `torchperfd captures list`"
            )
        return self.directory / capture_id

    def create(self, capture_id: str) -> Path:
        """Make the folder of a new capture.

        Raises:
            TorchperfdError: The directory cannot be written, or has such a capture already.
        """
        folder = self.folder(capture_id)
        try:
            try:
                folder.mkdir()
            except FileNotFoundError:
                # A service's directory is there already, open to all; what we make is its owner's alone.
                self.directory.mkdir(mode=0o700, parents=True)
                folder.mkdir()
            folder.chmod(_FOLDER_MODE)  # mkdir's own mode is subject to the umask
        except OSError as error:
            raise TorchperfdError(
                f"cannot write to {self.directory}: {error.strerror}", "choose another with --captures-dir"
            ) from error
        return folder

    def save(self, record: CaptureRecord) -> None:
        """Write the capture's manifest, whole or not at all.

        Raises:
            TorchperfdError: It cannot be written.
        """
        path = self.folder(record.capture_id)
        part = f".{manifest.FILE_NAME}.{secrets.token_hex(8)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with _opened(path) as folder:
                descriptor = os.open(part, flags, 0o644, dir_fd=folder)
                try:
                    with open(descriptor, "wb") as file:  # noqa: PTH123
                        file.write(record.encode())
                    os.replace(part, manifest.FILE_NAME, src_dir_fd=folder, dst_dir_fd=folder)
                except OSError:
                    with contextlib.suppress(OSError):
                        os.unlink(part, dir_fd=folder)
                    raise
        except OSError as error:
            raise TorchperfdError(
                f"cannot write the manifest in {path}: {error.strerror}", "look at its disk and permissions"
            ) from error

    def list(self) -> list[CaptureRecord]:
        """Return all captures, newest first."""
        if not self.directory.is_dir():
            return []
        records = [
            record
            for folder in self.directory.iterdir()
            if _ID.fullmatch(folder.name) and (record := _read(folder)) is not None
        ]
        return sorted(records, key=lambda record: record.requested_at, reverse=True)

    def get(self, capture_id: str) -> CaptureRecord:
        """Return one capture.

        Raises:
            NoSuchTargetError: There is none of this name.
        """
        folder = self.folder(capture_id)
        record = _read(folder)
        if record is None:
            raise NoSuchTargetError(
                f"no capture {capture_id} in {self.directory}", "list them with `torchperfd captures list`"
            )
        return record

    def remove(self, capture_id: str) -> None:
        """Delete a capture and its traces.

        Raises:
            NoSuchTargetError: There is none of this name.
            TorchperfdError: It cannot be deleted.
        """
        self.get(capture_id)
        try:
            shutil.rmtree(self.folder(capture_id))
        except OSError as error:
            raise TorchperfdError(
                f"cannot delete {self.folder(capture_id)}: {error.strerror}", "delete it as its owner"
            ) from error


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    """Hold a folder open, so that it stays the same one whatever becomes of its name."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _content(folder: int, name: str) -> tuple[bytes, float]:
    """Return a small regular file's content and when it was written.

    Raises:
        OSError: It cannot be read, or is something else.
    """
    # Non-blocking, since opening a pipe that nobody writes to would wait forever.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with open(os.open(name, flags, dir_fd=folder), "rb") as file:  # noqa: PTH123
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{name} is no regular file")
        content = file.read(_MOST_MANIFEST_BYTES + 1)
    if len(content) > _MOST_MANIFEST_BYTES:
        raise OSError(f"{name} has more than {_MOST_MANIFEST_BYTES} bytes")
    return content, status.st_mtime


def _read(path: Path) -> CaptureRecord | None:
    try:
        with _opened(path) as folder:
            with contextlib.suppress(OSError, RecursionError, msgspec.MsgspecError):
                record = manifest.decode(_content(folder, manifest.FILE_NAME)[0])
                record.capture_id = path.name
                return record
            return _from_rank_manifests(folder, path.name)
    except OSError:
        return None


def _from_rank_manifests(folder: int, capture_id: str) -> CaptureRecord | None:
    """Put a record together from what the ranks wrote: a capture that no daemon took part in."""
    record = None
    for name in sorted(filter(_RANK_MANIFEST.fullmatch, os.listdir(folder))):
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


def overall_state(ranks: list[RankTrace]) -> CaptureState:
    """Return what a capture has come to, once all its ranks have ended."""
    complete = sum(rank.state is CaptureState.COMPLETE for rank in ranks)
    if complete == len(ranks) and ranks:
        return CaptureState.COMPLETE
    return CaptureState.PARTIAL if complete else CaptureState.FAILED


def first_reason(ranks: list[RankTrace]) -> str:
    """Return why a capture is not complete: the first failing rank's words, and how many failed."""
    failed = [rank for rank in ranks if rank.state is CaptureState.FAILED]
    if not failed:
        return ""
    more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
    return f"rank {failed[0].rank}: {failed[0].reason}{more}"
