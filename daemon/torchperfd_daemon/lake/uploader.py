"""The lake's worker in the daemon: records, seals a batch every five minutes, and starts the sender.

A store that is away costs lateness only: batches wait in the journal, within its bound.
"""

import asyncio
import contextlib
import importlib.util
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from torchperfd.model.own_commands import own_command
from torchperfd.v1.variables import known_environment
from torchperfd_daemon.background import WorkerHealth
from torchperfd_daemon.errors import TorchperfdError
from torchperfd_daemon.lake.journal import Journal, Marked, Pending
from torchperfd_daemon.lake.recorder import Mark, Recorder
from torchperfd_daemon.lake.tables import JSON_LINES, PARQUET

log = logging.getLogger("torchperfd.lake")

WINDOW_S: Final = 300.0
"""From one batch to the next."""
RECORD_S: Final = 30.0
MAX_SEND_S: Final = 240.0
"""How long a sender may take. The next one goes on from there."""
_MAX_ERROR_BYTES: Final = 2000
_MAX_UNWRITTEN: Final = 20
"""Ten minutes of rows that the journal did not take."""


@dataclass(slots=True)
class LakeCounts:
    """What has become of rows since the daemon started; read by the metrics page.

    Attributes:
        rows: By result. ``dropped`` are those beyond the journal's bound, or that it could not take.
        bytes: Size of the objects sent.
        pending: What waits in the journal.
        last_success_unix_seconds: When the store last had everything; 0 for never.
    """

    rows: dict[str, int] = field(default_factory=lambda: {"recorded": 0, "sent": 0, "dropped": 0})
    bytes: int = 0
    pending: Pending = field(default_factory=Pending)
    last_success_unix_seconds: float = 0.0


def preferred_form() -> str:
    """Return what objects are written as: Parquet where pyarrow is installed. It is not imported here."""
    return PARQUET if importlib.util.find_spec("pyarrow") is not None else JSON_LINES


class LakeWorker:
    """Records rows, and sends them.

    Args:
        command: Starts the sender; see ``sender.py`` for what it prints.
        wall: Unix seconds.
    """

    def __init__(
        self,
        recorder: Recorder,
        journal: Journal,
        command: list[str],
        form: str,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._recorder = recorder
        self._journal = journal
        self._command = command
        self._form = form
        self._wall = wall
        self._busy = asyncio.Lock()
        # What a full disk did not take, is taken later.
        self._unwritten: deque[Callable[[Mark], Marked]] = deque(maxlen=_MAX_UNWRITTEN)
        self.counts = LakeCounts()
        self.health = WorkerHealth("lake", period_seconds=RECORD_S)

    async def run(self) -> None:
        """Record twice a minute and send every five minutes, until cancelled; first what was left before."""
        due = 0.0
        while True:
            try:
                await self.record()
                if time.monotonic() >= due:
                    due = time.monotonic() + WINDOW_S
                    await self.send()
                self.health.succeeded(self._wall())
            except Exception as error:
                # A failure here must not end the daemon. It is logged once until a round succeeds.
                if self.health.failed():
                    is_expected = isinstance(error, TorchperfdError)
                    log.warning("history is late: %s", error, exc_info=None if is_expected else error)
            await asyncio.sleep(RECORD_S)

    async def record(self, *, final: bool = False) -> None:
        """Append what is new to the journal.

        Args:
            final: The daemon ends.

        Raises:
            TorchperfdError: The journal did not take it.
        """
        now = self._wall()
        async with self._busy:
            self._unwritten.append(await self._recorder.collect(now, final=final))
            while self._unwritten:
                written = await asyncio.to_thread(self._journal.append, now, self._unwritten[0])
                self._unwritten.popleft()
                self.counts.rows["recorded"] += written

    async def send(self, seconds: float = MAX_SEND_S) -> None:
        """Seal a batch, and have all that wait sent.

        Raises:
            TorchperfdError: Not all of them were; the rest waits.
        """
        async with self._busy:
            dropped = await asyncio.to_thread(self._journal.seal, self._wall(), self._form)
            self.counts.rows["dropped"] += dropped
            self.counts.pending = await asyncio.to_thread(self._journal.pending)
            if self.counts.pending.rows:
                await self._run_sender(seconds)
            self.counts.last_success_unix_seconds = self._wall()

    async def finish(self) -> None:
        """Record what there is at the daemon's end."""
        with contextlib.suppress(TorchperfdError):
            await self.record(final=True)

    async def flush(self, seconds: float) -> None:
        """Send what there is within a time, and close the journal; the next daemon sends the rest."""
        try:
            await self.send(seconds)
        except TorchperfdError as error:
            log.warning("the next daemon of this node sends the newest history: %s", error)
        finally:
            await asyncio.to_thread(self._journal.close)

    async def _run_sender(self, seconds: float) -> None:
        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**known_environment(os.environ), "TOKIO_WORKER_THREADS": "2"},
        )
        assert process.stdout is not None
        assert process.stderr is not None
        sent: dict[int, int] = {}
        try:
            async with asyncio.timeout(seconds):
                async for line in process.stdout:
                    sequence, size = map(int, line.split())
                    sent[sequence] = size
                errors = await process.stderr.read(_MAX_ERROR_BYTES)
                code = await process.wait()
        except TimeoutError:
            raise TorchperfdError(f"the store has not taken everything within {seconds:.0f} s") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            await self._settle(sent)
        if code:
            lines = errors.decode(errors="replace").strip().splitlines()
            raise TorchperfdError(lines[-1] if lines else f"the sender ended with {code}")

    async def _settle(self, sent: dict[int, int]) -> None:
        """Delete from the journal what the store has."""
        self.counts.rows["sent"] += await asyncio.to_thread(self._journal.sent, sent)
        self.counts.bytes += sum(sent.values())
        self.counts.pending = await asyncio.to_thread(self._journal.pending)


def sender_command(url: str, cluster: str, journal_folder: str, node: str) -> list[str]:
    """Return the command that sends a journal's batches."""
    return own_command("torchperfd_daemon.lake.sender", url, cluster, journal_folder, node)
