"""The interface of collectors, and the sampler that runs one and keeps its newest sample."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

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
        """Add a series."""
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
