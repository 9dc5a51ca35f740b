"""Keeps what was read from a store of series for a while; reads it while a command imports its modules."""

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from torchperfd_daemon.fleet.series import read_series
from torchperfd_daemon.fleet.series_model import Series
from torchperfd_daemon.fleet.series_store import SeriesStore

MAX_AGE_S: Final = 5.0
"""How long an answer is used again: series change once per scrape."""
MAX_KEPT: Final = 4


class SeriesReader:
    """Reads the series of runs.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, store: SeriesStore, clock: Callable[[], float] = time.monotonic) -> None:
        self.store = store
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: dict[tuple[str, str, bool], tuple[float, Series]] = {}
        self._begun: Future[Series] | None = None

    def begin(self) -> None:
        """Begin to read all runs with the status of their ranks, unless something was read before.

        The answer, or the error, is that of the next :meth:`read` of all runs. Waiting for the store takes
        about as long as importing numpy and what compares ranks.
        """
        with self._lock:
            if self._begun is None and not self._kept:
                pool = ThreadPoolExecutor(1, "series-reader")
                self._begun = pool.submit(read_series, self.store, with_status=True)
                pool.shutdown(wait=False)

    def read(self, run: str, job: str, *, with_status: bool = False) -> Series:
        """Return the series, read at most :data:`MAX_AGE_S` ago; what has more serves for less.

        Raises:
            TorchperfdError: As ``read_series``.
        """
        with self._lock:
            for key in ((run, job, True), *([] if with_status else [(run, job, False)])):
                at, kept = self._kept.get(key, (-math.inf, None))
                if kept is not None and self._clock() - at < MAX_AGE_S:
                    return kept
            begun, self._begun = self._begun, None
            if begun is not None and not run and not job:
                series, with_status = begun.result(), True
            else:
                series = read_series(self.store, run, job, with_status=with_status)
            while len(self._kept) >= MAX_KEPT:
                self._kept.pop(min(self._kept, key=lambda key: self._kept[key][0]))
            self._kept[run, job, with_status] = self._clock(), series
            return series
