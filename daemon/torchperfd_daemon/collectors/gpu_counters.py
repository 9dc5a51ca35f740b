"""Counters derived from rates, from bits that are on or off, and from counters that wrap."""

from collections.abc import Iterable


class RateTotal:
    """The integral of a rate.

    Attributes:
        total: The integral, in the rate's unit times seconds.
    """

    def __init__(self) -> None:
        self.total = 0.0

    def add(self, rate: float, seconds: float) -> None:
        """Add a mean rate over some seconds."""
        self.total += rate * seconds


class WrappingTotal:
    """A counter of a few bits, continued past its end. Two wraps between samples look like one."""

    def __init__(self) -> None:
        self.total = 0.0
        self._last: float | None = None

    def update(self, count: float, bits: int) -> None:
        """Take a reading of a counter that wraps after ``bits`` bits."""
        if self._last is not None:
            self.total += (count - self._last) % 2**bits
        self._last = count


class ActiveTime:
    """How long each of several states was on, from samples of the states that are on.

    A state that is on at both ends of an interval counts as on throughout, one that is on at one
    end for half of it. That is as good as the sampling rate allows.

    Attributes:
        seconds: Time on since the first sample, by name.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.seconds = dict.fromkeys(names, 0.0)
        self._last: tuple[float, frozenset[str]] | None = None

    def update(self, now: float, on: frozenset[str]) -> None:
        """Add a sample at ``now``, in monotonic seconds."""
        if self._last is not None:
            then, before = self._last
            for name in self.seconds:
                self.seconds[name] += (now - then) * ((name in before) + (name in on)) / 2
        self._last = now, on

    def pause(self) -> None:
        """Count nothing between the last sample and the next, because the states are unknown."""
        self._last = None
