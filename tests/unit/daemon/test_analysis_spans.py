"""Innermost and outermost spans against a search through all of them."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from torchperfd_daemon.analysis.intervals import Spans, outermost

TIME = st.integers(0, 30)
SPANS = st.lists(st.tuples(TIME, TIME).map(lambda span: (min(span), max(span))), max_size=14)


def columns(spans: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    table = np.array(spans, dtype=np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


@given(SPANS)
def test_the_innermost_span_is_the_open_one_that_began_last(spans: list[tuple[int, int]]) -> None:
    moments = np.arange(-1, 32)
    expected = []
    for moment in moments.tolist():
        opened = [at for at, (start, end) in enumerate(spans) if start <= moment < end]
        expected.append(max(opened, key=lambda at: (spans[at][0], -spans[at][1], at), default=-1))
    assert Spans(*columns(spans)).innermost(moments).tolist() == expected


@given(SPANS)
def test_the_first_span_to_end_after_a_moment(spans: list[tuple[int, int]]) -> None:
    moments = np.arange(-1, 32)
    by_start = sorted(range(len(spans)), key=lambda at: (spans[at][0], -spans[at][1]))
    expected = [next((at for at in by_start if spans[at][1] > moment), -1) for moment in moments.tolist()]
    assert Spans(*columns(spans)).first_ending_after(moments).tolist() == expected


@given(SPANS)
def test_outermost_spans_begin_when_all_earlier_ones_are_over(spans: list[tuple[int, int]]) -> None:
    expected, reached = [], -1
    for at in sorted(range(len(spans)), key=lambda at: (spans[at][0], -spans[at][1])):
        if spans[at][0] >= reached:
            expected.append(at)
        reached = max(reached, spans[at][1])
    assert outermost(*columns(spans)).tolist() == expected
