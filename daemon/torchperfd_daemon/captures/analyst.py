"""Analyses every capture after it has ended, in a separate process.

A trace of 50 MB takes the analyser half a second of a core and 150 MB: too much for a daemon that shares
its node with a training. So ``torchperfd analyze`` does it, at idle priority, one capture at a
time; the daemon waits, stores its output, and reads a few numbers from it.
"""

import contextlib
import logging
import mmap
import os
import queue
import re
import secrets
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO, Final

import msgspec

from torchperfd.model.own_commands import own_file_command
from torchperfd_daemon import untrusted_files
from torchperfd_daemon.background import WorkerHealth
from torchperfd_daemon.captures import folder, low_priority
from torchperfd_daemon.captures.analysis_child import (
    MAX_IDLE_S,
    AnalysisChild,
    ChildFiles,
    StuckError,
    child_files,
)
from torchperfd_daemon.captures.catalog import Catalog
from torchperfd_daemon.captures.manifest import CaptureRecord
from torchperfd_daemon.errors import TorchperfdError, explained

log = logging.getLogger("torchperfd.captures")

TIMEOUT_S: Final = 1800.0
"""Timeout of an analysis; on a busy node a process at idle priority makes little progress."""

_TRACE: Final = re.compile(r"rank\d{1,9}\.json(?:\.gz)?")
_MAX_WAITING: Final = 64
_MAX_RUNS: Final = 64
_CLEAR_UP_S: Final = 1.0
"""Most time to remove the file of an analysis that was ended."""


@dataclass(frozen=True, slots=True)
class RankShares:
    """Where a rank's device time went, as parts of the time from its first event to its last; they sum to 1.

    Attributes:
        compute: Kernels that are no communication, or memory being set.
        exposed_comm: Communication, and no compute.
        exposed_memcpy: Copies, and neither.
    """

    rank: int
    compute: float
    exposed_comm: float
    exposed_memcpy: float
    idle: float


@dataclass(slots=True)
class AnalysisCounts:
    """Results of analyses since the daemon started; read by the metrics page.

    Attributes:
        results: Number of analyses by result; ``stuck`` are those that waited
            without doing anything, ``dropped`` those that the full queue did not accept.
        newest: By run, the newest capture's ranks that used a device; of the runs analysed last.
        last_success_unix_seconds: When one was last stored; 0 for never.
    """

    results: dict[str, int] = field(
        default_factory=lambda: {"analysed": 0, "failed": 0, "stuck": 0, "dropped": 0}
    )
    newest: dict[str, tuple[RankShares, ...]] = field(default_factory=dict)
    last_success_unix_seconds: float = 0.0

    def remember(self, run: str, shares: tuple[RankShares, ...]) -> None:
        """Keep the newest shares of a run; of too many runs the one analysed longest ago is dropped."""
        # Replaced, not changed: a reader on another thread keeps a consistent copy.
        others = deque(((name, kept) for name, kept in self.newest.items() if name != run), _MAX_RUNS - 1)
        self.newest = {**dict(others), run: shares}


def command_for(files: ChildFiles) -> list[str]:
    """Return the command that analyses a capture and writes the document to its output."""
    arguments = ("analyze", "--json", "--with-text", "--workers", "1", *files.folders)
    # By its path: as a module it would import this package first, 0.2 s of CPU at normal priority.
    return own_file_command(low_priority.__file__, *files.arguments(), *arguments)


class Analyst:
    """Analyses captures one by one, on a thread that does nothing but wait for a process.

    Args:
        command: Returns the command that analyses a capture.
        timeout: Seconds that it may take.
        max_idle: Seconds that it may wait without doing anything.
    """

    def __init__(
        self,
        catalog: Catalog,
        command: Callable[[ChildFiles], list[str]] = command_for,
        timeout: float = TIMEOUT_S,
        max_idle: float = MAX_IDLE_S,
    ) -> None:
        self._catalog = catalog
        self._command = command
        self._child = AnalysisChild(timeout, max_idle)
        self._waiting: queue.Queue[CaptureRecord | None] = queue.Queue(_MAX_WAITING)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self.run, name="torchperfd-analyst", daemon=True)
        self.counts = AnalysisCounts()
        self.health = WorkerHealth("analysis")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop analysing, and end the analysis in progress."""
        self._stopped.set()
        self._child.stop()
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(None)
        if self._thread.is_alive():
            self._thread.join(_CLEAR_UP_S)

    def submit(self, record: CaptureRecord) -> None:
        """Have a capture that has ended analysed; returns at once, from any thread."""
        if not _traces(record):
            return
        try:
            self._waiting.put_nowait(record)
        except queue.Full:
            self.counts.results["dropped"] += 1
            log.warning("capture %s is not analysed: too many others wait", record.capture_id)

    def analyse(self, record: CaptureRecord) -> None:
        """Analyse a capture and store the document beside its traces, unless there is one.

        Raises:
            TorchperfdError: The analysis failed, or cannot be stored.
        """
        capture_id = record.capture_id
        path = self._catalog.folder(capture_id)
        with explained(f"cannot write to {path}"):
            if self._catalog.lacking():
                raise TorchperfdError("the disk is full except for the space that must stay free")
            with child_files(self._catalog, [capture_id]) as files, folder.opened(path) as held:
                self._store(held, files, record.run)

    def run(self) -> None:
        """Analyse the submitted captures one by one, until :meth:`stop`."""
        while (record := self._waiting.get()) is not None and not self._stopped.is_set():
            try:
                if self._catalog.has_analysis(record.capture_id):
                    continue
                self.analyse(record)
            except Exception as error:
                if self._stopped.is_set():
                    return
                self.counts.results["stuck" if isinstance(error, StuckError) else "failed"] += 1
                self.health.failed()
                expected = isinstance(error, (TorchperfdError, OSError))
                log.warning(
                    "capture %s is not analysed: %s",
                    record.capture_id,
                    error,
                    exc_info=None if expected else error,
                )
            else:
                now = self._catalog.wall()
                self.counts.results["analysed"] += 1
                self.counts.last_success_unix_seconds = now
                self.health.succeeded(now)

    def _store(self, held: int, files: ChildFiles, run: str) -> None:
        part = f".{folder.ANALYSIS}.{secrets.token_hex(8)}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with open(os.open(part, flags, folder.FILE_MODE, dir_fd=held), "r+b") as output:  # noqa: PTH123
                self._child.run(self._command(files), files, output)
                self.counts.remember(run, _shares(output))
            os.replace(part, folder.ANALYSIS, src_dir_fd=held, dst_dir_fd=held)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(part, dir_fd=held)


class _Breakdown(msgspec.Struct):
    n_gpu_events: int
    window_us: float
    idle_us: float
    compute_us: float
    exposed_comm_us: float
    exposed_memcpy_us: float


class _Scopes(msgspec.Struct):
    all: _Breakdown


class _Rank(msgspec.Struct):
    rank: int | None
    breakdown: _Scopes


class _Document(msgspec.Struct):
    ranks: list[_Rank]


def _shares(document: IO[bytes]) -> tuple[RankShares, ...]:
    """Read the shares of the ranks that used a device out of an analysis.

    Raises:
        TorchperfdError: It is none.
    """
    try:
        # Mapped, so that a long one costs this process no memory of its own.
        with mmap.mmap(document.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            ranks = untrusted_files.decode(mapped, _Document).ranks
    except ValueError as error:
        raise TorchperfdError("the analyser wrote no analysis") from error
    return tuple(
        RankShares(
            each.rank,
            device.compute_us / device.window_us,
            device.exposed_comm_us / device.window_us,
            device.exposed_memcpy_us / device.window_us,
            device.idle_us / device.window_us,
        )
        for each in ranks
        if each.rank is not None and (device := each.breakdown.all).n_gpu_events and device.window_us
    )


def _traces(record: CaptureRecord) -> list[str]:
    """Return the names of a capture's traces, which not all of its files have to be."""
    return [trace.file for trace in record.ranks if _TRACE.fullmatch(trace.file)]
