"""The captures directory: one folder per capture, readable without a running daemon."""

import contextlib
import os
import re
import shutil
from pathlib import Path
from typing import Any, Final

import msgspec

from torchperfd_daemon.captures import manifest
from torchperfd_daemon.captures.manifest import CaptureOptions, CaptureRecord, CaptureState, RankTrace
from torchperfd_daemon.errors import NoSuchTargetError, TorchperfdError

_ID: Final = re.compile(r"[0-9A-Za-z][0-9A-Za-z_-]{0,79}")


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

    def create(self, capture_id: str, owner: int | None) -> Path:
        """Make the folder of a new capture.

        Args:
            capture_id: Its name.
            owner: User who must be able to write there, when this daemon runs as root for others.

        Raises:
            TorchperfdError: The directory cannot be written.
        """
        folder = self.folder(capture_id)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if owner is not None and os.geteuid() == 0 and owner != 0:
                os.chown(folder, owner, -1)
        except OSError as error:
            raise TorchperfdError(
                f"cannot write to {self.directory}: {error.strerror}", "choose another with --captures-dir"
            ) from error
        return folder

    def save(self, record: CaptureRecord) -> None:
        """Write the capture's manifest, whole or not at all."""
        path = self.folder(record.capture_id) / manifest.FILE_NAME
        part = path.with_name(f".{path.name}.part")
        part.write_bytes(record.encode())
        part.replace(path)

    def list(self) -> list[CaptureRecord]:
        """Return all captures, newest first."""
        if not self.directory.is_dir():
            return []
        records = [
            record
            for folder in self.directory.iterdir()
            if folder.is_dir() and (record := self._read(folder)) is not None
        ]
        return sorted(records, key=lambda record: record.requested_at, reverse=True)

    def get(self, capture_id: str) -> CaptureRecord:
        """Return one capture.

        Raises:
            NoSuchTargetError: There is none of this name.
        """
        folder = self.folder(capture_id)
        record = self._read(folder) if folder.is_dir() else None
        if record is None:
            raise NoSuchTargetError(
                f"no capture {capture_id} in {self.directory}", "list them with `torchperfd captures list`"
            )
        return record

    def remove(self, capture_id: str) -> None:
        """Delete a capture and its traces.

        Raises:
            NoSuchTargetError: There is none of this name.
        """
        self.get(capture_id)
        shutil.rmtree(self.folder(capture_id))

    def _read(self, folder: Path) -> CaptureRecord | None:
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            return manifest.decode((folder / manifest.FILE_NAME).read_bytes())
        return _from_rank_manifests(folder)


def _from_rank_manifests(folder: Path) -> CaptureRecord | None:
    """Put a record together from what the ranks wrote: a capture that no daemon took part in."""
    record = None
    for path in sorted(folder.glob("rank*.manifest.json")):
        try:
            found: dict[str, Any] = msgspec.json.decode(path.read_bytes())
            trace = RankTrace(
                rank=int(found["rank"]),
                state=CaptureState(found["state"]),
                reason=str(found["reason"]),
                file=str(found["file"]),
                bytes=int(found["bytes"]),
                sha256=str(found["sha256"]),
            )
            start, stop = found["step_range"]
            options = CaptureOptions(**found["options"])
        except (OSError, ValueError, KeyError, TypeError, msgspec.MsgspecError):
            continue
        if record is None:
            record = CaptureRecord(
                capture_id=folder.name,
                run=str(found.get("run", "")),
                trigger="script",
                requested_at=path.stat().st_mtime,
                step_range=(int(start), int(stop)),
                options=options,
            )
        record.ranks.append(trace)
    if record is not None:
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
