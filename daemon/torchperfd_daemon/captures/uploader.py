"""The uploader: every capture that has ended is uploaded, whatever the destination does meanwhile."""

import asyncio
import logging
import random
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from torchperfd_daemon.background import WorkerHealth
from torchperfd_daemon.captures.catalog import Catalog
from torchperfd_daemon.captures.destination import Destination, UploadError
from torchperfd_daemon.captures.index import Index
from torchperfd_daemon.captures.receipt import Upload
from torchperfd_daemon.captures.upload import Uploaded, upload
from torchperfd_daemon.errors import TorchperfdError

log = logging.getLogger("torchperfd.captures")

LOOK_S: Final = 10.0
FIRST_DELAY_S: Final = 2.0
LONGEST_DELAY_S: Final = 900.0
_JITTER: Final = 0.5


@dataclass(slots=True)
class UploadCounts:
    """What uploads have come to since the daemon started; read by the metrics page."""

    results: dict[str, int] = field(default_factory=lambda: {"uploaded": 0, "failed": 0, "refused": 0})
    bytes: int = 0
    pending: int = 0
    last_success_unix_seconds: float = 0.0


class Uploader:
    """Uploads captures one by one, oldest first; a destination that fails is asked less and less often.

    What is to be done is read from the folders, so a daemon that was killed goes on where it was.

    Args:
        catalog: The captures directory.
        destination: Where they go.
        clock: Monotonic seconds.
        chance: A number in [0, 1) at random: many daemons shall not ask again at the same moment.
    """

    def __init__(
        self,
        catalog: Catalog,
        destination: Destination,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._catalog = catalog
        self._destination = destination
        self._clock = clock
        self._chance = chance
        self._delay = 0.0
        self._not_before = 0.0
        self._failed: dict[str, int] = {}
        self._unnoted: set[str] = set()
        self.counts = UploadCounts()
        self.health = WorkerHealth("uploads")

    @property
    def url(self) -> str:
        """Where captures go."""
        return self._destination.url

    async def run(self) -> None:
        """Upload until cancelled."""
        while True:
            try:
                pause = await self.turn()
                self.health.succeeded(self._catalog.wall())
            except (TorchperfdError, OSError, sqlite3.Error) as error:
                self.health.failed()
                log.warning("captures are not uploaded: %s", error)
                pause = LOOK_S
            except Exception:
                self.health.failed()
                log.exception("captures are not uploaded, by a bug of ours or of obstore's")
                pause = LONGEST_DELAY_S
            await asyncio.sleep(pause)

    async def turn(self) -> float:
        """Upload what is to be uploaded now; return after how many seconds to look again.

        Raises:
            TorchperfdError: The captures directory cannot be read.
        """
        waiting = await asyncio.to_thread(self._look)
        self.counts.pending = len(waiting)
        self._failed = {each: self._failed[each] for each in waiting if each in self._failed}
        # Last what has failed most: one that the destination never takes keeps no other waiting.
        for capture_id in sorted(waiting, key=lambda each: self._failed.get(each, 0)):
            if self._clock() < self._not_before:
                break
            if await self._upload(capture_id):
                self.counts.pending -= 1
        return min(LOOK_S, max(FIRST_DELAY_S / 2, self._not_before - self._clock()))

    def _look(self) -> list[str]:
        with Index(self._catalog.directory, self._catalog.wall) as index:
            index.refresh()
            return [each for each in index.to_upload() if each not in self._unnoted]

    async def _upload(self, capture_id: str) -> bool:
        """Upload one capture; return whether it need not be tried again."""
        try:
            done = await upload(self._catalog, self._destination, capture_id)
        except UploadError as error:
            self._back_off(capture_id, error)
            return False
        except TorchperfdError:
            # It has gone, or is no longer what was looked at: the next look sees it as it is.
            return True
        self._delay = 0.0
        try:
            await asyncio.to_thread(self._catalog.note_upload, capture_id, done.receipt)
        except TorchperfdError as error:
            # So the next daemon uploads it once more, and finds that it is there.
            self._unnoted.add(capture_id)
            log.warning("%s", error)
        # Not earlier: until its receipt is written it counts as pending, and never as both.
        self._count(capture_id, done)
        return True

    def _count(self, capture_id: str, done: Uploaded) -> None:
        if done.receipt.upload is Upload.REFUSED:
            self.counts.results["refused"] += 1
            log.warning("capture %s is not uploaded, now or later: %s", capture_id, done.receipt.reason)
            return
        self.counts.results["uploaded"] += 1
        self.counts.bytes += done.bytes
        self.counts.last_success_unix_seconds = done.receipt.at
        log.info("uploaded capture %s to %s", capture_id, done.receipt.url)

    def _back_off(self, capture_id: str, error: UploadError) -> None:
        self._failed[capture_id] = self._failed.get(capture_id, 0) + 1
        self._delay = min(LONGEST_DELAY_S, self._delay * 2 or FIRST_DELAY_S)
        delay = self._delay * (1 - _JITTER * self._chance())
        self._not_before = self._clock() + delay
        self.counts.results["failed"] += 1
        log.warning("capture %s is not uploaded yet: %s; next try in %.0f s", capture_id, error, delay)
