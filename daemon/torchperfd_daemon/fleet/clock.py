"""The offset between the clock of another node and the local one."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request and its response, in Unix ns: sent and arrived by the local clock, the rest by theirs."""

    sent_ns: int
    received_ns: int
    answered_ns: int
    arrived_ns: int

    @property
    def offset_ns(self) -> int:
        """Their clock less ours, if both ways took equally long (theta of RFC 5905, section 8)."""
        return ((self.received_ns - self.sent_ns) + (self.answered_ns - self.arrived_ns)) // 2

    @property
    def delay_ns(self) -> int:
        """Time on the way, there and back (delta of RFC 5905): the offset is wrong by at most half of it."""
        return (self.arrived_ns - self.sent_ns) - (self.answered_ns - self.received_ns)


class ClockOffset:
    """The offset measured by the quickest of several exchanges; queueing only adds to the delay."""

    def __init__(self) -> None:
        self._best: Exchange | None = None

    def add(self, exchange: Exchange) -> None:
        """Add an exchange. One that arrived before it was sent is ignored."""
        if exchange.delay_ns >= 0 and (self._best is None or exchange.delay_ns < self._best.delay_ns):
            self._best = exchange

    @property
    def ns(self) -> int | None:
        """Their clock less ours; None until it is measured."""
        return None if self._best is None else self._best.offset_ns
