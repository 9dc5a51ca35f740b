"""Pauses within a fit, and saves beside its steps."""

import gc
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchperfd.hooks.checkpoints import BackgroundSaves
from torchperfd.hooks.pauses import FitPauses, GcPauses
from torchperfd.link.wire import totals_from_message, totals_to_message
from torchperfd.model.totals import PhaseTotals
from torchperfd.steps.phases import PhaseNames
from torchperfd.steps.totals import Totals


class Process:
    """A process whose collections are made by hand; nanoseconds."""

    def __init__(self) -> None:
        self.now = 0
        self.pauses = GcPauses(clock=lambda: self.now)

    def collect(self, start: int, length: int, generation: int = 0) -> None:
        self.now = start
        self._call_back("start", generation)
        self.now = start + length
        self._call_back("stop", generation)

    def _call_back(self, phase: str, generation: int) -> None:
        for callback in self.pauses.callbacks:
            callback(phase, {"generation": generation})


@pytest.fixture
def process() -> Process:
    return Process()


MANY = [(2000 + 10 * number, 3, number % 2) for number in range(10_000)]


@pytest.mark.parametrize(
    ("played", "calls", "ns"),
    [
        # Collections are (start, length, generation); a range settles what is within its steps.
        pytest.param(
            [(100, 50, 2), (200, 50, 2), (300, 50, 2), range(0), (900, 50, 2), (1100, 7), range(1000, 2000)],
            [1, 0, 0],
            [7, 0, 0],
            id="before the first step",
        ),
        pytest.param(
            [(1100, 10, 1), range(1000, 2000), (5000, 900, 2), range(1000, 2000)],
            [0, 1, 0],
            [0, 10, 0],
            id="after the last step",
        ),
        pytest.param([(990, 20), (1990, 20), range(1000, 2000)], [0, 0, 0], [0, 0, 0], id="across an edge"),
        pytest.param(
            [
                (1100, 1),
                range(1000, 1500),
                *MANY,
                range(1000, 200_000),
            ],
            [5_001, 5_000, 0],
            [15_001, 15_000, 0],
            id="more than are kept",
        ),
    ],
)
def test_fit_pauses_are_those_between_the_edges_of_steps(
    process: Process, played: list[tuple[int, ...] | range], calls: list[int], ns: list[int]
) -> None:
    fit = FitPauses(process.pauses)
    for each in played:
        if isinstance(each, range):
            fit.settle(each.start, each.stop)
        else:
            process.collect(*each)
    assert (fit.calls, fit.ns) == (calls, ns)


def test_fit_pauses_after_newest_step_count_once_another_ends(process: Process) -> None:
    fit = FitPauses(process.pauses)
    process.collect(1_100, 10)
    process.collect(2_500, 20)
    fit.settle(1_000, 2_000)
    assert fit.ns == [10, 0, 0]
    fit.settle(1_000, 2_000)
    assert fit.ns == [10, 0, 0]
    fit.settle(1_000, 3_000)
    assert fit.ns == [30, 0, 0]


def test_fit_pauses_long_wait_for_a_step_keeps_all_in_bounds(process: Process) -> None:
    fit = FitPauses(process.pauses)
    process.collect(1_100, 1)
    fit.settle(1_000, 1_500)
    for number in range(20_000):
        process.collect(2_000 + 10 * number, 3, number % 3)
        if number % 100 == 0:
            fit.settle(1_000, 1_500)
    assert fit.calls == [1, 0, 0]
    assert fit.waiting_count <= 4_200
    fit.settle(1_000, 300_000)
    assert sum(fit.calls) == 20_001
    assert sum(fit.ns) == 60_001


def test_fit_pauses_many_before_training_are_dropped(process: Process) -> None:
    fit = FitPauses(process.pauses)
    for number in range(20_000):
        process.collect(10 * number, 3)
        if number % 100 == 0:
            fit.settle(0, 0)
    assert fit.waiting_count <= 4_200
    process.collect(300_000, 5)
    fit.settle(290_000, 310_000)
    assert (fit.calls, fit.ns) == ([1, 0, 0], [5, 0, 0])


def test_collections_that_the_script_calls_for_have_a_line() -> None:
    pauses = GcPauses()
    fit = FitPauses(pauses)
    original = gc.collect
    pauses.install()
    began = time.perf_counter_ns()
    try:
        for _ in range(3):
            gc.collect()
        gc.collect(0)
        line = sys._getframe().f_lineno - 2
    finally:
        pauses.uninstall()
    fit.settle(began, time.perf_counter_ns())
    assert gc.collect is original
    (found,) = fit.longest_calls
    assert (found.file, found.line, found.call, found.calls) == (__file__, line, "collect", 3)
    assert 0 < found.ns <= fit.ns[2]


def test_collection_that_python_begins_has_no_line(process: Process) -> None:
    fit = FitPauses(process.pauses)
    process.collect(1_100, 10, 2)
    fit.settle(1_000, 2_000)
    assert (fit.calls[2], fit.longest_calls) == (1, ())


def test_call_that_began_no_collection_names_no_later_one(process: Process) -> None:
    """A call within a collection returns at once."""
    fit = FitPauses(process.pauses)
    process.now = 1_050
    process.pauses.install()
    within: list[int] = []

    def call_within(phase: str, _facts: dict[str, int]) -> None:
        if not within:
            within.append(gc.collect())

    # Of the client's own callbacks none is called: these collections are not seen.
    for callback in process.pauses.callbacks:
        gc.callbacks.remove(callback)
    gc.callbacks.append(call_within)
    try:
        gc.collect()
    finally:
        gc.callbacks.remove(call_within)
        process.pauses.uninstall()
    assert within == [0]
    process.collect(10**9, 10, 2)
    fit.settle(1_000, 2 * 10**9)
    assert (fit.calls[2], fit.longest_calls) == (1, ())


class Clock:
    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


@given(
    st.lists(st.tuples(st.integers(0, 100), st.integers(0, 100)), max_size=8),
    st.sets(st.integers(0, 100), max_size=10),
)
def test_time_is_the_union_of_saves_however_often_it_is_read(
    saves: list[tuple[int, int]], looks: set[int]
) -> None:
    intervals = [(min(each), max(each)) for each in saves]
    clock = Clock()
    counted = BackgroundSaves(clock)
    numbers: dict[int, int] = {}
    calls = 0
    under_way: set[int] = set()
    for clock.now in range(101):
        for index, (began, ended) in enumerate(intervals):
            if began == clock.now:
                numbers[index] = counted.begin()
                calls += not under_way
                under_way.add(index)
            if ended == clock.now:
                counted.end(numbers[index])
                counted.end(numbers[index])
                under_way.discard(index)
        if clock.now in looks:
            until = {now for began, ended in intervals for now in range(began, min(ended, clock.now))}
            assert counted.ns() == len(until)
    assert counted.ns() == len({now for began, ended in intervals for now in range(began, ended)})
    assert counted.calls == calls


def test_saves_in_the_background_reach_the_daemon() -> None:
    totals = Totals(background_saves=PhaseTotals(3, 12_000_000_000))
    names = PhaseNames()
    message = totals_to_message(totals, names, 0, {}).account
    assert (message.background_saves.calls, message.background_saves.ns) == (3, 12_000_000_000)
    assert totals_from_message(message, names).background_saves == totals.background_saves
    assert not totals_to_message(Totals(), names, 0, {}).account.HasField("background_saves")
