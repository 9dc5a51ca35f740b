"""The offset of another clock is known to half the time on the way."""

from hypothesis import given
from hypothesis import strategies as st

from torchperfd_daemon.fleet.relay import ClockOffset, Exchange

NS = st.integers(0, 10**9)


@given(st.integers(-(10**15), 10**15), st.lists(st.tuples(NS, NS, NS), min_size=1, max_size=20))
def test_clock_offset_error_is_within_half_the_quickest_exchange(
    offset: int, ways: list[tuple[int, int, int]]
) -> None:
    clock, now = ClockOffset(), 10**18
    for there, busy, back in ways:
        received = now + there + offset
        clock.add(Exchange(now, received, received + busy, now + there + busy + back))
        now += 10**9
    assert clock.ns is not None
    assert abs(clock.ns - offset) <= min(there + back for there, _, back in ways) // 2 + 1


def test_answer_older_than_its_question_is_ignored() -> None:
    clock = ClockOffset()
    clock.add(Exchange(1000, 50, 60, 900))
    assert clock.ns is None
