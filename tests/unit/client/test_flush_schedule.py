"""When the flusher flushes: on the grid of the wall clock, as the flushers of all ranks do."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchperfd.link.outbox import WATCHED_S, FlushState, NextFlush, flush_interval, next_flush

NOW = 1_700_000_001.3

SHORT = FlushState(NOW, steps=10_000, step_seconds=0.001)


@pytest.mark.parametrize(
    ("state", "interval"),
    [
        (FlushState(NOW), 1.0),
        (FlushState(NOW, steps=100_000, step_seconds=0.3), 1.0),
        (FlushState(NOW, steps=10_000, step_seconds=0.005), 1.0),
        (FlushState(NOW, steps=10_000, step_seconds=0.0049), 4.0),
        (FlushState(NOW, steps=10_000, step_seconds=0.0001), 4.0),
        (FlushState(NOW, steps=9_999, step_seconds=0.001), 1.0),
        (FlushState(NOW, steps=10_000, step_seconds=0.001, is_live=True), 1.0),
    ],
)
def test_flush_interval_by_state(state: FlushState, interval: float) -> None:
    assert flush_interval(state) == interval


@pytest.mark.parametrize(
    ("now", "seconds"), [(1_700_000_001.25, 2.75), (1_700_000_000.0, 4.0), (1_700_000_003.5, 0.5)]
)
def test_next_flush_short_steps_is_at_a_multiple_of_4(now: float, seconds: float) -> None:
    assert next_flush(FlushState(now, SHORT.steps, SHORT.step_seconds)) == NextFlush(seconds)


@pytest.mark.parametrize(
    ("now", "step_seconds", "due"),
    [
        (1_700_000_001.25, 0.1, NextFlush(0.25, is_extra=True)),
        (1_700_000_001.75, 0.1, NextFlush(0.25)),
        (1_700_000_002.0, 0.1, NextFlush(0.5, is_extra=True)),
        (1_700_000_001.25, 0.001, NextFlush(0.25, is_extra=True)),
        (1_700_000_001.75, 0.001, NextFlush(0.25, is_extra=True)),
        (1_700_000_003.75, 0.001, NextFlush(0.25)),
    ],
)
def test_next_flush_watched_is_at_half_seconds(now: float, step_seconds: float, due: NextFlush) -> None:
    """Those on the grid of a run without a page stay regular flushes."""
    assert next_flush(FlushState(now, 10_000, step_seconds, is_watched=True)) == due


@given(st.floats(1_700_000_000, 1_800_000_000), st.sampled_from((0.001, 0.1)), st.booleans())
def test_next_flush_is_on_the_grid_of_all_ranks(now: float, step_seconds: float, is_watched: bool) -> None:
    state = FlushState(now, steps=10_000, step_seconds=step_seconds, is_watched=is_watched)
    interval, seconds = WATCHED_S if is_watched else flush_interval(state), next_flush(state).seconds
    assert 0 < seconds <= interval
    due = (now + seconds) / interval
    assert due == pytest.approx(round(due), abs=1e-5, rel=0)
