"""Our own failures are counted by place and logged once, and too many disable a hook."""

import logging

import pytest

from torchperfd.safety.logs import Faults


def test_a_place_is_spent_at_the_limit_and_no_other_with_it(caplog: pytest.LogCaptureFixture) -> None:
    faults = Faults(limit=3)
    for _ in range(2):
        faults.note("flusher", ValueError("no"))
        assert not faults.spent("flusher")
    faults.note("flusher", ValueError("no"))
    faults.note("stream", OSError())
    assert faults.spent("flusher")
    assert not faults.spent("stream")
    assert not faults.spent("a place that never failed")
    assert faults.counts() == {"flusher": 3, "stream": 1}


def test_log_has_first_failure_in_full_and_last_in_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    faults = Faults(limit=3)
    error = ValueError("a reason")
    for _ in range(100):
        faults.note("flusher", error)
    first, last = caplog.records
    assert (first.levelno, first.name) == (logging.WARNING, "torchperfd")
    assert first.getMessage() == "flusher failed; training goes on unaffected"
    assert first.exc_info is not None
    assert first.exc_info[1] is error
    assert last.getMessage() == "flusher failed 3 times and is now off"
    assert last.exc_info is None
    assert faults.counts() == {"flusher": 100}


def test_returned_counts_are_a_copy() -> None:
    faults = Faults()
    faults.note("flusher", ValueError())
    faults.counts()["flusher"] = 99
    assert faults.counts() == {"flusher": 1}


def test_ten_failures_are_enough_by_default() -> None:
    faults = Faults()
    for _ in range(9):
        faults.note("hook draw", ValueError())
    assert not faults.spent("hook draw")
    faults.note("hook draw", ValueError())
    assert faults.spent("hook draw")
