"""The line that samples name: which one, how sure, and when there is none."""

import random

import pytest

from torchperfd.slow_line import SlowLine
from torchperfd_daemon.diagnosis.line_counts import ENOUGH_SAMPLES, LEAST_SAMPLES, LineCounts

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


def test_result_joins_the_calls_of_one_line() -> None:
    other = (*DECODE[:3], "open")
    found = counts(("fetch", DECODE, 4), ("fetch", other, 6), ("fetch", AUGMENT, 5)).result()
    assert found is not None
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
    found = made.result()
    assert found is not None
    assert found.words == "data.py:52 in augment: 100% of the host's work (other 100%)"


def test_result_of_unknown_places_names_the_stage() -> None:
    assert counts(("pin", None, 10)).result() == SlowLine("pin", 1.0, samples=10)


def test_result_with_few_samples_is_none() -> None:
    assert counts(("fetch", DECODE, LEAST_SAMPLES - 1)).result() is None


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
