"""Saves beside the steps: for how long at least one was under way, whenever one looks."""

from hypothesis import given
from hypothesis import strategies as st

from torchperfd.hooks.checkpoints import BackgroundSaves
from torchperfd.link.wire import read_totals, totals_message
from torchperfd.steps.phases import PhaseNames
from torchperfd.steps.totals import PhaseTotals, Totals


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
    message = totals_message(totals, names, 0, {}).account
    assert (message.background_saves.calls, message.background_saves.ns) == (3, 12_000_000_000)
    assert read_totals(message, names).background_saves == totals.background_saves
    assert not totals_message(Totals(), names, 0, {}).account.HasField("background_saves")
