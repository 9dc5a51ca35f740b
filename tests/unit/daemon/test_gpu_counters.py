"""Counters made of rates, of bits, and of counters that wrap."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchperfd_daemon.collectors.nvml_counters import ActiveTime, RateTotal, WrappingTotal


def test_a_rate_becomes_its_integral() -> None:
    rate = RateTotal()
    rate.add(10.0, 2.0)
    rate.add(0.0, 100.0)
    rate.add(4.0, 0.5)
    assert rate.total == 22


@given(st.integers(0, 2**32 - 1), st.lists(st.integers(0, 2**32 - 1), max_size=20), st.sampled_from([32, 64]))
def test_a_wrapping_counter_goes_on(start: int, increments: list[int], bits: int) -> None:
    counter = WrappingTotal()
    true = start
    counter.update(true % 2**bits, bits)
    for increment in increments:
        true += increment
        counter.update(true % 2**bits, bits)
    assert counter.total == true - start


def test_what_was_on_at_one_end_counts_half() -> None:
    active = ActiveTime(["hot", "brake"])
    active.update(10.0, frozenset({"hot"}))
    assert active.seconds == {"hot": 0, "brake": 0}
    active.update(12.0, frozenset({"hot", "brake"}))
    assert active.seconds == {"hot": 2, "brake": 1}
    active.update(13.0, frozenset())
    assert active.seconds == {"hot": 2.5, "brake": 1.5}


def test_nothing_is_counted_over_a_pause() -> None:
    active = ActiveTime(["hot"])
    active.update(0.0, frozenset({"hot"}))
    active.pause()
    active.update(100.0, frozenset({"hot"}))
    active.update(101.0, frozenset({"hot", "unnamed"}))
    assert active.seconds == {"hot": 1}


@given(st.lists(st.tuples(st.floats(0.01, 10), st.booleans()), min_size=2, max_size=30))
def test_time_on_never_exceeds_time(looks: list[tuple[float, bool]]) -> None:
    active = ActiveTime(["hot"])
    now, shown = 0.0, [0.0]
    for seconds, on in looks:
        now += seconds
        active.update(now, frozenset({"hot"} if on else ()))
        shown.append(active.seconds["hot"])
    assert shown == sorted(shown)
    assert shown[-1] <= now - looks[0][0] + 1e-9
    if all(on for _, on in looks):
        assert shown[-1] == pytest.approx(now - looks[0][0])
