"""What must be true of the advice on any trace, over 2,000 made at random."""

import pytest
from tests.support.advice_invariants import violations, violations_of
from tests.support.advice_settings import unknown_names
from tests.support.random_traces import random_trace
from tests.unit.daemon import traces

from torchperfd_daemon import analysis
from torchperfd_daemon.analysis.advice import Advice, gather

_TRACES = 2000
_PARTS = 8


@pytest.mark.parametrize("part", range(_PARTS))
def test_advice_on_random_traces_keeps_the_invariants(part: int) -> None:
    """Idle within the recording, savings within the step, no tool's name, and only settings that exist."""
    settings: dict[str, int] = {}
    ranks: list[tuple[int | None, tuple[Advice, ...]]] = []
    for seed in range(part, _TRACES, _PARTS):
        events, facts = random_trace(seed)
        summary = analysis.summarise(traces.trace_of(events, **facts))
        assert list(violations(summary)) == [], seed
        settings |= {advice.setting: seed for advice in summary.advice}
        ranks = [*ranks[-3:], (seed, summary.advice)]
        steps = [
            each.saves_ns_per_step / each.share_of_step
            for _, advice in ranks
            for each in advice
            if each.share_of_step
        ]
        assert list(violations_of(gather(ranks), max(steps, default=0.0))) == [], seed
    assert {setting: seed for setting, seed in settings.items() if unknown_names(setting)} == {}


def test_random_traces_reach_every_kind_of_answer() -> None:
    """The traces are worth little unless rules fire on some and conditions stop them on others."""
    rules = set()
    for seed in range(200):
        events, facts = random_trace(seed)
        rules |= {each.rule for each in analysis.summarise(traces.trace_of(events, **facts)).advice}
    assert {"float64", "mixed-precision", "needless-synchronisation", "compiled-optimizer"} <= rules
    assert {"loader-workers", "exposed-communication", "fused-optimizer"} <= rules


def test_violations_of_a_false_promise_are_found() -> None:
    def advice(evidence: str, saves: float, share: float) -> Advice:
        return Advice("host-bound", evidence, saves, share, "change", "setting")

    assert list(violations_of([advice("the device idles 56.1 ms of the 25.2 ms recorded", 1, 0.1)], 10))
    assert list(violations_of([advice("fine", 11, 1.1)], 10))
    assert list(violations_of([advice("fine", 6, 0.6), advice("fine", 6, 0.6)], 10))
    assert list(violations_of([advice("most in torch::unwind::unwind()", 1, 0.1)], 10))
    assert not list(violations_of([advice("the device idles 5 ms of the 25.2 ms recorded", 5, 0.5)], 10))
