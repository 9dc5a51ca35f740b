"""Keeps what the live page shows of runs in one small file, so that it survives the daemon."""

import contextlib
import logging
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from torchperfd.v1 import access
from torchperfd_daemon import documents
from torchperfd_daemon.captures import folder
from torchperfd_daemon.text import clean_fields
from torchperfd_daemon.views.percentiles import StepPercentiles

log = logging.getLogger("torchperfd.http")

FOLDER: Final = ".page"

MAX_BYTES: Final = 1 << 20

Mark = dict[str, str | int | float | None]
"""What happened in a run, as documents have it."""


@dataclass(slots=True)
class Sparkline:
    """The run's mean step over ten minutes; see ``views.history.sparkline``."""

    until_unix_seconds: int | None
    interval_seconds: int
    step_seconds: list[float | None]


@dataclass(slots=True)
class RunRow:
    """What a document has of a run that has ended."""

    run: str
    job_name: str
    world_size: int
    state: str
    started_unix_seconds: float
    ended_unix_seconds: float
    steps: int
    step_seconds: float | None
    sparkline: Sparkline
    step_percentiles: StepPercentiles | None = None
    outcome: str = ""


@dataclass(slots=True)
class KeptRun:
    """A run in the file.

    Attributes:
        marks: The oldest first.
        verdict: The message, packed; empty without one.
        users: Whose its ranks were.
    """

    row: RunRow
    marks: list[Mark]
    verdict: bytes
    users: list[int | None]


class RunsFile:
    """Reads and writes the file. Where it cannot be used, one warning is logged and nothing is kept.

    Args:
        directory: Folder of the file, created on first use.
        node: Name of the node. Each has its own file, since nodes may share a home directory.
    """

    def __init__(self, directory: Path, node: str) -> None:
        self._directory = directory
        self._file = f"{node.replace('/', '_') or 'node'}.json"
        self._has_warned = False

    def load(self) -> list[KeptRun]:
        """Return the runs; none from a file that is missing, damaged or too long."""
        try:
            with self._opened() as held, open(folder.open_file(held, self._file), "rb") as file:  # noqa: PTH123
                content = file.read(MAX_BYTES + 1)
            runs = documents.decode(content, list[KeptRun])
        except FileNotFoundError:
            return []
        except (OSError, documents.DamagedError) as error:
            log.warning("what was kept of earlier runs is not shown: %s", error)
            return []
        for run in runs:
            clean_fields(run)
        return runs

    def save(self, runs: Iterable[KeptRun]) -> None:
        """Replace the file by runs, the most important first: those beyond a megabyte are left out."""
        parts: list[bytes] = []
        left = MAX_BYTES - len(b"[]")
        for run in runs:
            part = msgspec.json.encode(run)
            left -= len(part) + len(b",")
            if left < 0:
                break
            parts.append(part)
        try:
            self._directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._directory.mkdir(mode=0o700, exist_ok=True)
            with self._opened() as held:
                folder.write(held, self._file, b"[%s]" % b",".join(parts))
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                log.warning("runs that end are not shown any more once the daemon has stopped: %s", error)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        """Hold the folder open.

        Raises:
            OSError: It is not there, is a link, or other users can write to it.
        """
        with folder.opened(self._directory) as held:
            status = os.fstat(held)
            if status.st_uid != os.geteuid() or access.may_others_write(status):
                raise PermissionError(f"{self._directory} must be a folder that only this user can write to")
            yield held
