"""Advice on real training loops: the slow ones of benchmarks/advice, recorded by torch's own profiler.

How much the advice saves is the benchmark's to measure; a machine under test load cannot.
"""

import sys
from collections.abc import Iterator

import pytest
from benchmarks.advice.loops import Loop
from benchmarks.advice.scripts import SCRIPTS, WELL_TUNED


@pytest.fixture
def loop(request: pytest.FixtureRequest) -> Iterator[Loop]:
    with Loop(*request.param) as loop:
        yield loop


@pytest.mark.parametrize(
    ("loop", "rule"),
    [((name, "slow"), script.rule) for name, script in SCRIPTS.items()],
    ids=list(SCRIPTS),
    indirect=["loop"],
)
def test_the_rule_that_a_slow_loop_breaks_comes_first(loop: Loop, rule: str) -> None:
    advice = loop.advice()
    assert advice
    assert advice[0].rule == rule
    assert 0.03 <= advice[0].share_of_step <= 1
    assert sum(each.share_of_step for each in advice) <= 1 + sys.float_info.epsilon * len(advice)


# Whether a loader's workers keep up is a matter of the machine's load.
TAKEN = {name: script.rule for name, script in SCRIPTS.items() if script.rule != "loader-workers"}


@pytest.mark.parametrize(
    ("loop", "rule"),
    [((name, "tuned"), rule) for name, rule in TAKEN.items()],
    ids=list(TAKEN),
    indirect=["loop"],
)
def test_who_took_the_advice_does_not_hear_it_again(loop: Loop, rule: str) -> None:
    assert rule not in [each.rule for each in loop.advice()]


@pytest.mark.parametrize(
    "loop", [(name, "tuned") for name in WELL_TUNED], ids=list(WELL_TUNED), indirect=True
)
def test_nothing_is_said_of_a_well_tuned_loop(loop: Loop) -> None:
    assert [each.rule for each in loop.advice()] == []
