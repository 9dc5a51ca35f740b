"""Analysis pages of captures, made by ``torchperfd analyze --html`` in a process at idle priority."""

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from torchperfd_daemon.captures import Catalog, low_priority
from torchperfd_daemon.errors import TorchperfdError

log = logging.getLogger("torchperfd.http")

TIMEOUT_S: Final = 600.0
MOST_KEPT: Final = 8

_MOST_WAITING: Final = 4
_ERROR_CHARACTERS: Final = 300
# What `analyze` returns when it could read all ranks' traces, or some.
_MADE: Final = (0, 5)


def command_for(folder: Path, page: Path) -> list[str]:
    """Return the command that analyses a capture's folder and writes the page."""
    arguments = ("analyze", "--html", str(page), "--workers", "1", str(folder))
    return [sys.executable, "-P", low_priority.__file__, *arguments]


@dataclass(slots=True)
class Report:
    """A page that is being made, or was: with a reason it has failed."""

    page: Path
    task: "asyncio.Task[None]"
    reason: str = ""

    @property
    def state(self) -> str:
        """``making``, ``ready`` or ``failed``."""
        if not self.task.done():
            return "making"
        return "failed" if self.reason else "ready"


class Reports:
    """Makes pages one at a time, and keeps the newest in a private directory until the daemon stops."""

    def __init__(self, catalog: Catalog, command: Callable[[Path, Path], list[str]] = command_for) -> None:
        self._catalog = catalog
        self._command = command
        self._directory: Path | None = None
        self._reports: OrderedDict[str, Report] = OrderedDict()
        self._one_at_a_time = asyncio.Lock()

    def request(self, capture_id: str) -> Report:
        """Return a capture's page, which is begun if there is none or if it has failed.

        Raises:
            NoSuchTargetError: There is no such capture, or a trace of it is gone.
            TorchperfdError: It has not ended, has no trace, or too many pages are being made.
        """
        known = self._reports.get(capture_id)
        if known is not None and known.state != "failed":
            self._reports.move_to_end(capture_id)
            return known
        self._check(capture_id)
        if sum(report.state == "making" for report in self._reports.values()) >= _MOST_WAITING:
            raise TorchperfdError("too many pages are being made", "wait for one of them")
        if self._directory is None:
            self._directory = Path(tempfile.mkdtemp(prefix="torchperfd-pages-"))
        page = self._directory / f"{capture_id}.html"
        self._reports[capture_id] = Report(page, asyncio.create_task(self._make(capture_id, page)))
        self._forget_oldest()
        return self._reports[capture_id]

    def find(self, capture_id: str) -> Report | None:
        """Return a page that was requested."""
        return self._reports.get(capture_id)

    async def close(self) -> None:
        """Stop, and delete the pages."""
        tasks = [report.task for report in self._reports.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _check(self, capture_id: str) -> None:
        record = self._catalog.get(capture_id)
        if not record.state.ended:
            raise TorchperfdError(f"capture {capture_id} is in progress", "wait for its end")
        files = [trace.file for trace in record.ranks if trace.file]
        if not files:
            raise TorchperfdError(f"capture {capture_id} has no trace", "see the reasons of its ranks")
        for name in files:
            # Any user may have put something else in its place, such as a pipe that never ends.
            self._catalog.open_public(capture_id, name).close()

    async def _make(self, capture_id: str, page: Path) -> None:
        try:
            async with self._one_at_a_time:
                reason = await self._execute(self._command(self._catalog.folder(capture_id), page))
            if not reason and not page.is_file():
                reason = "the analyser wrote no page"
        except (OSError, TorchperfdError) as error:
            reason = str(error)
        if reason:
            log.warning("capture %s has no page: %s", capture_id, reason)
        report = self._reports.get(capture_id)
        if report is not None:
            report.reason = reason

    async def _execute(self, command: list[str]) -> str:
        """Run a command to its end; return why it failed, empty when it did not."""
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(TIMEOUT_S):
                _, errors = await process.communicate()
        except TimeoutError:
            return f"the analysis took more than {TIMEOUT_S:,.0f} s"
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        if process.returncode in _MADE:
            return ""
        last = (errors.decode(errors="replace").strip().splitlines() or [""])[-1]
        text = "".join(letter for letter in last if letter.isprintable()).removeprefix("torchperfd: ")
        return text[:_ERROR_CHARACTERS] or f"the analyser ended with {process.returncode}"

    def _forget_oldest(self) -> None:
        done = [capture_id for capture_id, report in self._reports.items() if report.state != "making"]
        for capture_id in done[: max(0, len(self._reports) - MOST_KEPT)]:
            self._reports.pop(capture_id).page.unlink(missing_ok=True)
