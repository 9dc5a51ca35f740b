"""How far the clock of another node is from ours."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Exchange:
    """One question and its answer, as Unix nanoseconds: sent and arrived by our clock, the rest by theirs."""

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
    """The offset that the quickest of several exchanges tells; waiting in queues only adds to the delay."""

    def __init__(self) -> None:
        self._best: Exchange | None = None

    def add(self, exchange: Exchange) -> None:
        """Take an exchange into account. One that arrived before it was sent tells nothing."""
        if exchange.delay_ns >= 0 and (self._best is None or exchange.delay_ns < self._best.delay_ns):
            self._best = exchange

    @property
    def ns(self) -> int | None:
        """Their clock less ours; None as long as nothing is known."""
        return None if self._best is None else self._best.offset_ns
