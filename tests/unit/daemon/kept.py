"""Captures on the disk, for tests of what keeps, lists and sends them."""

import asyncio
import hashlib
import os
from pathlib import Path
from typing import Any

from tests.support.values import some

from torchperfd_daemon.captures.catalog import Catalog
from torchperfd_daemon.captures.manifest import CaptureRecord, CaptureState, RankTrace, Upload
from torchperfd_daemon.captures.uploader import Uploader

BASE = 1_700_000_000.0
"""When the first of them was asked for; Unix seconds."""


def add(
    catalog: Catalog, capture_id: str, contents: dict[int, bytes] | None = None, **more: Any
) -> CaptureRecord:
    """Make a capture with one trace per rank, ended unless ``state`` says otherwise; return its record."""
    folder = catalog.create(capture_id)
    contents = {0: b"{}"} if contents is None else contents
    state = more.get("state", CaptureState.COMPLETE)
    reached = CaptureState.COMPLETE if state.ended else state
    traces = []
    for rank, content in contents.items():
        (folder / f"rank{rank}.json").write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
        traces.append(RankTrace(rank, reached, "", f"rank{rank}.json", len(content), digest))
    values: dict[str, Any] = {
        "run": "bert-17",
        "trigger": "command",
        "requested_at": BASE,
        "state": CaptureState.COMPLETE,
        "step_range": (120, 125),
        "ranks": traces,
        **more,
    }
    record = CaptureRecord(capture_id=capture_id, **values)
    catalog.save(record)
    return record


def settle(catalog: Catalog, seconds: float = 3600.0) -> None:
    """Make all folders, and the directory, look as if they had last changed long ago."""
    for path in (*catalog.directory.iterdir(), catalog.directory):
        when = path.stat().st_mtime - seconds
        os.utime(path, (when, when))


def ids(catalog: Catalog) -> list[str]:
    """Return the ids that a listing shows, newest first."""
    return [listed.record.capture_id for listed in catalog.list().captures]


def disk_bytes(folder: Path) -> int:
    """Return what a folder's files take on the disk."""
    return sum(path.lstat().st_blocks * 512 for path in folder.iterdir())


def stage(catalog: Catalog, capture_id: str) -> Upload:
    """Return how far the upload of a capture is."""
    return some(catalog.found(capture_id)).upload


def turn(uploader: Uploader) -> float:
    """Upload what waits; return the seconds until the next turn."""
    return asyncio.run(uploader.upload_pending())
