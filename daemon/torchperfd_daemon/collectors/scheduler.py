"""Runs several samplers one after the other, at a fixed rate, on one thread."""

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from torchperfd_daemon.collectors.base import Sampler

_HANG_S: Final = 2.0


class CollectorScheduler:
    """Runs samplers one after the other on one worker thread, whenever they are due.

    They share a thread because waking one up costs more CPU than most collectors use. A sampler that
    hangs keeps the thread, and the others continue on a new one.

    Args:
        samplers: In the order in which they run.
        interval: Seconds between two runs of the same sampler.
        stop: Ends the thread once it is set.
    """

    def __init__(
        self,
        samplers: Sequence[Sampler],
        interval: float,
        clock: Callable[[], float] = time.monotonic,
        stop: threading.Event | None = None,
    ) -> None:
        self._samplers = samplers
        self._interval = interval
        self._clock = clock
        self._stop = stop or threading.Event()
        self._hang_seconds = max(_HANG_S, interval)
        self._due = 0.0
        self._run_began: float | None = None
        self._thread = self._new_thread()

    def start(self) -> None:
        """Start sampling."""
        self._due = self._clock()
        self._thread.start()

    def replace_worker(self) -> None:
        """Continue on a new thread if a sampler hangs on the present one, or has ended it.

        Call it every few seconds.
        """
        began = self._run_began
        hangs = began is not None and self._clock() - began > self._hang_seconds
        if hangs or (
            self._thread.ident is not None and not self._thread.is_alive() and not self._stop.is_set()
        ):
            self._run_began = None
            self._thread = self._new_thread()
            self._thread.start()

    def stop(self) -> None:
        """End the thread; one that hangs in its collector is left behind."""
        self._stop.set()
        self._thread.join(1.0)

    def _new_thread(self) -> threading.Thread:
        name = self._samplers[0].name if len(self._samplers) == 1 else "node"
        return threading.Thread(target=self._run, name=f"collect-{name}", daemon=True)

    def _run(self) -> None:
        while not self._stop.is_set():
            for sampler in self._samplers:
                if sampler.sampling:
                    continue  # it hangs on a thread that was replaced
                self._run_began = self._clock()
                sampler.sample_once()
                if threading.current_thread() is not self._thread:
                    return  # it took too long, and this thread was replaced
            self._run_began = None
            # From a fixed grid, so that slow samples do not make the rate drift.
            self._due += self._interval
            now = self._clock()
            if self._due < now:
                # Late: what was missed stays missed, and the grid stays where it is.
                self._due += math.ceil((now - self._due) / self._interval) * self._interval
            self._stop.wait(self._due - now)
