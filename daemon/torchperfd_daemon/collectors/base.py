"""The interface of collectors, the sampler of one, and the thread that runs several at a fixed rate."""

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

from torchperfd_daemon.background import WorkerHealth

HANGS_AFTER_S: Final = 10.0
"""A sample that takes longer than this, and longer than three intervals, counts as failed meanwhile."""

log = logging.getLogger("torchperfd.collectors")

Kind = Literal["gauge", "counter"]


@dataclass(frozen=True, slots=True)
class Family:
    """One metric with its series.

    Attributes:
        name: Without the ``torchperfd_`` prefix, and for counters without ``_total``.
        samples: Label values, in the order of ``labels``, and the value in base units.
    """

    name: str
    help: str
    kind: Kind
    labels: tuple[str, ...] = ()
    samples: list[tuple[tuple[str, ...], float]] = field(default_factory=list)

    def add(self, value: float, *label_values: str) -> None:
        self.samples.append((label_values, value))


class CollectorUnavailableError(Exception):
    """The collector cannot sample for a known reason; logged without a traceback."""


class NothingToCollectError(CollectorUnavailableError):
    """The node has nothing for the collector to sample: not a failure, and no series about one."""


class Collector(Protocol):
    """Samples one thing. ``sample`` may block or raise: that costs this collector only."""

    name: str

    def sample(self) -> Sequence[Family]:
        """Return the current values.

        Raises:
            NothingToCollectError: There is nothing to sample on this node.
            CollectorUnavailableError: It cannot be sampled, for a reason that is known.
        """


class Sampler:
    """Runs one collector, and keeps its newest sample.

    While the collector hangs there is no sample: old values are never shown as current.

    Args:
        interval: Seconds between samples; kept by the scheduler.
    """

    def __init__(
        self,
        collector: Collector,
        interval: float,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._collector = collector
        self._clock = clock
        self._wall = wall
        self._complained = False
        self._patience = max(HANGS_AFTER_S, 3 * interval)
        self._began: float | None = None
        self._families: Sequence[Family] = ()
        self._success = False
        self._duration = 0.0
        self.last_success_unix_seconds = 0.0
        self.has_nothing = False
        """Whether the newest sample found that the node has nothing to collect."""

    @property
    def name(self) -> str:
        """The collector's name."""
        return self._collector.name

    @property
    def families(self) -> Sequence[Family]:
        """The newest sample; empty when it failed, and while the collector hangs."""
        return () if self._hanging() else self._families

    @property
    def success(self) -> bool:
        """Whether the newest sample succeeded and the collector does not hang."""
        return self._success and not self._hanging()

    @property
    def duration_seconds(self) -> float:
        """Time the newest sample took, or has taken so far when the collector hangs."""
        return self._hanging() or self._duration

    @property
    def sampling(self) -> bool:
        """Whether the collector is at work."""
        return self._began is not None

    def sample_once(self) -> None:
        """Take one sample now."""
        began = self._began = self._clock()
        try:
            self._families = self._collector.sample()
            self._success = True
            self.has_nothing = False
            self.last_success_unix_seconds = self._wall()
            self._complained = False
        except Exception as error:
            self._families = ()
            self._success = False
            self.has_nothing = isinstance(error, NothingToCollectError)
            if not self._complained:
                self._complained = True
                level = logging.INFO if self.has_nothing else logging.WARNING
                quiet = isinstance(error, CollectorUnavailableError)
                log.log(level, "collector %s: %s", self.name, error, exc_info=None if quiet else error)
        self._duration = self._clock() - began
        self._began = None
        log.debug("collector %s: %d families, %.1f ms", self.name, len(self._families), self._duration * 1e3)

    def _hanging(self) -> float:
        """Return how long the sample in progress has taken, if that is too long; else 0."""
        began = self._began
        if began is None:
            return 0.0
        elapsed = self._clock() - began
        return elapsed if elapsed > self._patience else 0.0


_REPLACE_AFTER_S: Final = 2.0


class CollectorScheduler:
    """Runs samplers one after the other on one worker thread, whenever they are due.

    They share a thread because waking one up costs more CPU than most collectors use. A sampler that
    hangs keeps the thread, and the others continue on a new one.

    Args:
        samplers: In the order in which they run.
        interval: Seconds between two runs of the same sampler.
        stop: Ends the thread once it is set.

    Attributes:
        health: Its rounds are samples that have ended, well or not.
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
        self.health = WorkerHealth("sampler", period_seconds=interval)
        self._hang_seconds = max(_REPLACE_AFTER_S, interval)
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
                self.health.rounds += 1
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
