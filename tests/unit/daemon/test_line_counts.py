"""The line that samples name: which one, how sure, and when there is none."""

import random

import pytest
from tests.support.values import some

from torchperfd.model.source_lines import SlowLine
from torchperfd_daemon.observer.line_sampler import ENOUGH_SAMPLES, MIN_SAMPLES, LineCounts

DECODE = ("/job/data.py", 37, "__getitem__", "decode")
AUGMENT = ("/job/data.py", 52, "augment", "")
PAD = ("/job/data.py", 80, "pad", "stack")


def counts(
    *samples: tuple[str, tuple[str, int, str, str] | None, int], in_worker: bool = False
) -> LineCounts:
    made = LineCounts()
    for stage, line, count in samples:
        for _ in range(count):
            made.add(stage, line, in_worker=in_worker)
    return made


def test_result_names_the_line_of_the_slowest_stage() -> None:
    found = counts(("fetch", DECODE, 12), ("fetch", AUGMENT, 3), ("collate", PAD, 5), in_worker=True).result()
    assert found == SlowLine("fetch", 0.75, *DECODE, share=0.6, samples=20, in_workers=True)
    assert found.words == ("data.py:37 in __getitem__, calls decode: 60% of the workers' loading (fetch 75%)")


def test_result_has_the_line_that_leads_to_it() -> None:
    made = LineCounts()
    for number in range(10):
        entry = ("/job/train.py", 21, "__getitem__") if number else None
        made.add("fetch", AUGMENT, in_worker=False, entry=entry)
    found = some(made.result())
    assert found.words == (
        "data.py:52 in augment: 100% of loading (fetch 100%), from train.py:21 in __getitem__"
    )


def test_result_without_one_line_that_leads_has_none() -> None:
    made = LineCounts()
    for number in range(10):
        made.add("fetch", AUGMENT, in_worker=False, entry=("/job/train.py", number, "f"))
    found = some(made.result())
    assert (found.line, found.caller) == (52, "")


def test_result_joins_the_calls_of_one_line() -> None:
    other = (*DECODE[:3], "open")
    found = some(counts(("fetch", DECODE, 4), ("fetch", other, 6), ("fetch", AUGMENT, 5)).result())
    assert (found.line, found.call, found.share, found.in_workers) == (37, "open", 10 / 15, False)


def test_result_without_a_line_that_stands_out_names_the_stage() -> None:
    lines = [("fetch", ("/job/data.py", number, "f", ""), 1) for number in range(10)]
    found = counts(*lines).result()
    assert found == SlowLine("fetch", 1.0, samples=10)
    assert found.words == "fetch is 100% of loading; no line of it stands out"


def test_result_of_a_step_has_its_own_words() -> None:
    made = LineCounts(of_step=True)
    for _ in range(10):
        made.add("other", AUGMENT, in_worker=False)
    assert some(made.result()).words == "data.py:52 in augment: 100% of the host's work (other 100%)"


def test_result_of_unknown_places_names_the_stage() -> None:
    assert counts(("pin", None, 10)).result() == SlowLine("pin", 1.0, samples=10)


def test_result_with_few_samples_is_none() -> None:
    assert counts(("fetch", DECODE, MIN_SAMPLES - 1)).result() is None


def test_is_certain_needs_samples_and_a_lead() -> None:
    assert not counts(("fetch", DECODE, ENOUGH_SAMPLES - 1)).is_certain
    assert counts(("fetch", DECODE, ENOUGH_SAMPLES)).is_certain
    assert not counts(("fetch", DECODE, 20), ("collate", PAD, 19)).is_certain
    assert not LineCounts().is_certain


@pytest.mark.parametrize("share", [0.6, 0.7, 0.9])
def test_certain_line_is_the_true_one(share: float) -> None:
    """Of 200 sampled loaders, at most one that stops as certain names the wrong line."""
    chance, wrong = random.Random(5), 0
    for _ in range(200):
        made = LineCounts()
        for _ in range(40):
            made.add(*(("fetch", DECODE) if chance.random() < share else ("collate", PAD)), in_worker=False)
            if made.is_certain:
                break
        found = made.result()
        wrong += made.is_certain and found is not None and found.line != DECODE[1]
    assert wrong <= 1


MAIN = ("/job/train.py", 39, "main", "confusion")
LOG = ("/job/train.py", 44, "main", "log")
MODULE = ("/job/train.py", 60, "<module>", "main")


def of_step(*samples: tuple[tuple[tuple[str, int, str, str], ...], int], loop: bool = True) -> LineCounts:
    """Return samples of stacks in the script's own code, and whether the loop was seen in other parts."""
    made = LineCounts(of_step=True)
    for lines, count in samples:
        for _ in range(count):
            made.add("other", lines[0], in_worker=False, callers=lines[1:])
    if loop:
        made.add_elsewhere([("/job/train.py", 41, "main", "backward"), MODULE])
    return made


@pytest.mark.parametrize(
    ("at", "loop", "expected"),
    [
        # One line of the function takes most of it.
        ((9, 1, 0), True, (12, "confusion", 0.9)),
        # None does, but its call does.
        ((5, 5, 0), True, (39, "main", 1.0)),
        ((5, 5, 0), False, (39, "main", 1.0)),
        ((5, 4, 1), True, (39, "main", 0.9)),
        # Neither does any call: the loop's own caller is not named, since it calls everything.
        ((4, 3, 3), True, (12, "confusion", 0.4)),
    ],
)
def test_result_names_the_innermost_line_with_most_samples(
    at: tuple[int, int, int], loop: bool, expected: tuple[int, str, float]
) -> None:
    inner = [("/job/train.py", number, "confusion", "") for number in (12, 13)]
    found = some(
        of_step(
            ((inner[0], MAIN, MODULE), at[0]),
            ((inner[1], MAIN, MODULE), at[1]),
            ((LOG, MODULE), at[2]),
            loop=loop,
        ).result()
    )
    assert (found.line, found.function, found.share) == expected
    assert found.call == ("confusion" if found.line == 39 else "")


def test_result_counts_a_function_that_calls_itself_once() -> None:
    walk = [("/job/tree.py", number, "walk", "walk") for number in (7, 8)]
    found = some(of_step(((walk[0], walk[1], walk[0], MAIN), 5), ((walk[1], walk[0], MAIN), 5)).result())
    assert (found.share, found.call) == (1.0, "walk")
