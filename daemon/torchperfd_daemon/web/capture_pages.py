"""Pages of captures, and of two compared, made by a command with ``--html`` in a process at idle priority."""

import asyncio
import logging
import os
import shutil
import stat
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from torchperfd.model.own_commands import own_file_command
from torchperfd_daemon.captures import Catalog, low_priority
from torchperfd_daemon.captures.analysis_child import MAX_IDLE_S, ChildFiles, IdleWatch, child_files, kill
from torchperfd_daemon.errors import TorchperfdError, UsageError

log = logging.getLogger("torchperfd.http")

TIMEOUT_S: Final = 600.0
MAX_KEPT: Final = 8

_PAGE: Final = "page.html"
_MAX_PAGE_BYTES: Final = 256 * 2**20
_LOOK_S: Final = 5.0
_MAX_WAITING: Final = 4
_ERROR_CHARACTERS: Final = 300
# What the command returns when it could read all ranks' traces, or some.
_MADE: Final = (0, 5)


PageCaptures = tuple[str, ...]
"""The id of a capture, or those of two that are compared: before, after."""


def command_for(files: ChildFiles, page: str) -> list[str]:
    """Return the command that analyses a capture, or compares two, and writes the page."""
    name = "analyze" if len(files.folders) == 1 else "compare"
    arguments = (name, "--html", page, "--workers", "1", *files.folders)
    return own_file_command(low_priority.__file__, *files.arguments(), *arguments)


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

    def __init__(
        self, catalog: Catalog, command: Callable[[ChildFiles, str], list[str]] = command_for
    ) -> None:
        self._catalog = catalog
        self._command = command
        self._directory: Path | None = None
        self._reports: OrderedDict[PageCaptures, Report] = OrderedDict()
        self._one_at_a_time = asyncio.Lock()

    def request(self, *captures: str) -> Report:
        """Return the page of a capture or of two compared; it is begun if there is none or if it has failed.

        Raises:
            NoSuchTargetError: There is no such capture, or a trace of it is gone.
            UsageError: A capture is compared with itself.
            TorchperfdError: It has not ended, has no trace, or too many pages are being made.
        """
        if len(set(captures)) < len(captures):
            raise UsageError("a capture cannot be compared with itself", "choose two")
        known = self._reports.get(captures)
        if known is not None and known.state != "failed":
            self._reports.move_to_end(captures)
            return known
        for each in captures:
            self._check(each)
        if sum(report.state == "making" for report in self._reports.values()) >= _MAX_WAITING:
            raise TorchperfdError("too many pages are being made", "wait for one of them")
        if self._directory is None:
            self._directory = Path(tempfile.mkdtemp(prefix="torchperfd-pages-"))
        page = self._directory / f"{'-'.join(captures)}.html"
        self._reports[captures] = Report(page, asyncio.create_task(self._make(captures, page)))
        self._forget_oldest()
        return self._reports[captures]

    def find(self, *captures: str) -> Report | None:
        """Return a page that was requested."""
        return self._reports.get(captures)

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
            self._catalog.open_own(capture_id, name).close()

    async def _make(self, captures: PageCaptures, page: Path) -> None:
        try:
            async with self._one_at_a_time:
                with child_files(self._catalog, captures) as files:
                    reason = await self._execute(files)
                    if not reason:
                        reason = await asyncio.to_thread(_take, files.directory / _PAGE, page)
        except (OSError, TorchperfdError) as error:
            reason = str(error)
        if reason:
            log.warning("capture %s has no page: %s", " and ".join(captures), reason)
        report = self._reports.get(captures)
        if report is not None:
            report.reason = reason

    async def _execute(self, files: ChildFiles) -> str:
        """Run the command to its end; return why it failed, empty when it did not."""
        process = await asyncio.create_subprocess_exec(
            *self._command(files, _PAGE),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            **files.process_arguments(),
        )
        watch = IdleWatch(process.pid, time.monotonic())
        deadline = time.monotonic() + TIMEOUT_S
        output = asyncio.ensure_future(process.communicate())
        try:
            while not (await asyncio.wait([output], timeout=min(_LOOK_S, TIMEOUT_S)))[0]:
                now = time.monotonic()
                if now >= deadline:
                    return f"the analysis took more than {TIMEOUT_S:,.0f} s"
                if watch.idle_seconds(now) >= MAX_IDLE_S:
                    return f"the analyser waited for {MAX_IDLE_S:,.0f} s without doing anything"
            _, errors = output.result()
        finally:
            if process.returncode is None:
                kill(process.pid)
                await process.wait()
            output.cancel()
        if process.returncode in _MADE:
            return ""
        last = (errors.decode(errors="replace").strip().splitlines() or [""])[-1]
        text = "".join(letter for letter in last if letter.isprintable()).removeprefix("torchperfd: ")
        return text[:_ERROR_CHARACTERS] or f"the analyser ended with {process.returncode}"

    def _forget_oldest(self) -> None:
        done = [captures for captures, report in self._reports.items() if report.state != "making"]
        for captures in done[: max(0, len(self._reports) - MAX_KEPT)]:
            self._reports.pop(captures).page.unlink(missing_ok=True)


def _take(made: Path, page: Path) -> str:
    """Copy the page that a child has made into the daemon's directory; return why not, or ''."""
    try:
        # The child may have put anything there, such as a pipe that never ends.
        with (
            open(os.open(made, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as source,  # noqa: PTH123
            page.open("wb") as copy,
        ):
            status = os.fstat(source.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_PAGE_BYTES:
                return "the analyser wrote no page"
            copy.write(source.read(_MAX_PAGE_BYTES))
    except OSError:
        return "the analyser wrote no page"
    return ""
