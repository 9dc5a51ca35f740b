"""Advice on real training loops: the slow ones of benchmarks/advice, recorded by torch's own profiler.

How much the advice saves is the benchmark's to measure; a machine under test load cannot.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import pytest
from benchmarks.advice.forks import forks
from benchmarks.advice.loops import Loop, Start
from benchmarks.advice.scripts import SCRIPTS, WELL_TUNED

from torchperfd_daemon.analysis import Advice

# With glibc it happens that what products write is had anew, page by page, in every step that is recorded,
# which then takes five times as long (on one machine a third of the recordings): no test of what is said.
pytestmark = [pytest.mark.slow, pytest.mark.serial, pytest.mark.needs("libjemalloc")]

TOGETHER = 4
"""So many loops get ready at a time, for which they need not be alone."""

# Whether a loader's workers keep up is a matter of the machine's load.
TAKEN = {name: script.rule for name, script in SCRIPTS.items() if script.rule != "loader-workers"}
ALL = [
    *((name, "slow") for name in SCRIPTS),
    *((name, "tuned") for name in (*TAKEN, *WELL_TUNED)),
]


class AdviceOfLoops:
    """What is said of every loop. They get ready a few at a time; each is recorded while the others rest."""

    def __init__(self, start: Start) -> None:
        self._start = start
        self._advice: dict[tuple[str, str], Sequence[Advice]] = {}

    def of(self, name: str, variant: str) -> Sequence[Advice]:
        """Return the advice on a loop; it is collected for the loops after it as well."""
        if (name, variant) not in self._advice:
            first = ALL.index((name, variant))
            with ExitStack() as stack:
                loops = {
                    each: stack.enter_context(Loop(*each, self._start))
                    for each in ALL[first : first + TOGETHER]
                }
                for loop in loops.values():
                    loop.wait()
                for each, loop in loops.items():
                    loop.steps(4)  # what its loader has fetched ahead while it rested is used up
                    self._advice[each] = loop.record().advice
        return self._advice[name, variant]


@pytest.fixture(scope="module")
def loops() -> Iterator[AdviceOfLoops]:
    with forks() as start:
        yield AdviceOfLoops(start)


@pytest.mark.parametrize(
    ("name", "rule"), [(name, script.rule) for name, script in SCRIPTS.items()], ids=list(SCRIPTS)
)
def test_the_rule_that_a_slow_loop_breaks_comes_first(loops: AdviceOfLoops, name: str, rule: str) -> None:
    advice = loops.of(name, "slow")
    assert advice
    assert advice[0].rule == rule
    assert 0.03 <= advice[0].share_of_step <= 1
    assert sum(each.share_of_step for each in advice) <= 1 + sys.float_info.epsilon * len(advice)


@pytest.mark.parametrize(("name", "rule"), TAKEN.items(), ids=list(TAKEN))
def test_advice_already_taken_is_not_given_again(loops: AdviceOfLoops, name: str, rule: str) -> None:
    assert rule not in [each.rule for each in loops.of(name, "tuned")]


@pytest.mark.parametrize("name", WELL_TUNED)
def test_well_tuned_loop_gets_no_advice(loops: AdviceOfLoops, name: str) -> None:
    assert [each.rule for each in loops.of(name, "tuned")] == []
