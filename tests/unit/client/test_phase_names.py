"""Phase names: a closed set, sixteen of the user's own, and then ``other``."""

import pytest

from torchperfd.steps.phases import OTHER, PHASE_SLOTS, PhaseNames
from torchperfd.v1.contract import MAX_USER_PHASES, PHASES


def test_built_in_phases_have_their_slots_from_the_start() -> None:
    names = PhaseNames()
    assert [names.slot(name) for name in PHASES] == list(range(len(PHASES)))
    assert len(names) == len(PHASES)


def test_user_phases_keep_slots_in_order_of_first_use() -> None:
    names = PhaseNames()
    first = names.slot("augment")
    second = names.slot("log metrics ✓")
    assert (first, second) == (len(PHASES), len(PHASES) + 1)
    assert names.slot("augment") == first
    assert names.name(first) == "augment"
    assert names.name(second) == "log metrics ✓"
    assert len(names) == len(PHASES) + 2


def test_sixteen_user_phases_are_distinct_and_the_next_is_other() -> None:
    names = PhaseNames()
    slots = [names.slot(f"mine {number}") for number in range(MAX_USER_PHASES)]
    assert slots == list(range(len(PHASES), PHASE_SLOTS))
    assert names.overflowed == set()
    assert names.slot("one too many") == OTHER
    assert names.slot("mine 15") == PHASE_SLOTS - 1
    assert names.overflowed == {"one too many"}
    assert len(names) == PHASE_SLOTS == 27


def test_what_overflows_is_remembered_within_bounds() -> None:
    names = PhaseNames()
    for number in range(10_000):
        names.slot(f"batch {number}")
    assert len(names.overflowed) == MAX_USER_PHASES
    assert len(names) == PHASE_SLOTS


@pytest.mark.parametrize("name", ["", "x" * 65, "two\nlines", "tab\t", "\x1b[31m"])
def test_names_that_no_label_could_carry_are_refused(name: str) -> None:
    names = PhaseNames()
    with pytest.raises(ValueError, match="1 to 64 printable characters"):
        names.slot(name)
    assert len(names) == len(PHASES)


def test_the_longest_name_is_64_characters() -> None:
    assert PhaseNames().slot("x" * 64) == len(PHASES)
