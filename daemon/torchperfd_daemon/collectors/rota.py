"""A rota: several samplers in turn, at a fixed rate, on one thread."""

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from torchperfd_daemon.collectors.base import Sampler

_PATIENCE_S: Final = 2.0


class Rota:
    """Has samplers sample, one after the other, whenever they are due.

    A thread for each would do without what follows, but to wake one up costs several times what most
    collectors do. A sampler that hangs keeps the thread; the others go on with a fresh one.

    Args:
        samplers: In the order of their turns.
        interval: Seconds between two turns of the same sampler.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        samplers: Sequence[Sampler],
        interval: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._samplers = samplers
        self._interval = interval
        self._clock = clock
        self._stop = threading.Event()
        self._patience = max(_PATIENCE_S, interval)
        self._due = 0.0
        self._turn_began: float | None = None
        self._thread = self._fresh_thread()

    def start(self) -> None:
        """Begin to sample."""
        self._due = self._clock()
        self._thread.start()

    def relieve(self) -> None:
        """Leave the thread to a sampler that hangs, if one does, and go on without; call it now and then."""
        began = self._turn_began
        if began is not None and self._clock() - began > self._patience:
            self._turn_began = None
            self._thread = self._fresh_thread()
            self._thread.start()

    def stop(self) -> None:
        """End the thread; one that hangs in its collector is left behind."""
        self._stop.set()
        self._thread.join(1.0)

    def _fresh_thread(self) -> threading.Thread:
        name = self._samplers[0].name if len(self._samplers) == 1 else "node"
        return threading.Thread(target=self._run, name=f"collect-{name}", daemon=True)

    def _run(self) -> None:
        while not self._stop.is_set():
            for sampler in self._samplers:
                if sampler.sampling:
                    continue  # on a thread that was left to it
                self._turn_began = self._clock()
                sampler.sample_once()
                if threading.current_thread() is not self._thread:
                    return  # it took too long, and was relieved
            self._turn_began = None
            # From a fixed grid, so that slow samples do not make the rate drift.
            self._due += self._interval
            now = self._clock()
            if self._due < now:
                # Late: what was missed stays missed, and the grid stays where it is.
                self._due += math.ceil((now - self._due) / self._interval) * self._interval
            self._stop.wait(self._due - now)
