"""What advice is worth saying, of which ranks, and what the recording itself has added to a step."""

import statistics
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.daemon import traces
from tests.unit.daemon.advice_traces import (
    MS,
    US,
    annotation,
    doubles,
    kernel,
    step,
    with_memory,
)

from torchperfd.document.terminal import render
from torchperfd.model.formatting import ns_text
from torchperfd_daemon import analysis
from torchperfd_daemon.analysis.advice import rules
from torchperfd_daemon.analysis.advice.context import AdviceContext
from torchperfd_daemon.analysis.advice.edits import Edit
from torchperfd_daemon.analysis.advice.recording import (
    AFTER_NS,
    DISPATCH_NS,
    EVENT_NS,
    FRAME_NS,
    MEMORY_NS,
    SHAPES_NS,
)
from torchperfd_daemon.analysis.advice.rules import MIN_NS, MIN_SHARE, Advice, Finding, gather, weigh


@pytest.fixture(autouse=True)
def any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the traces of these tests be as short as what they show; `test_advice_conditions` has the floor."""
    monkeypatch.setattr(rules, "MIN_RECORDED_NS", 0)


FINDINGS = st.lists(
    st.builds(
        Finding,
        rule=st.text(max_size=3),
        evidence=st.just("e"),
        edit=st.builds(Edit, host_share=st.floats(0, 1)),
        change=st.just("c"),
        setting=st.just("s"),
        risk=st.booleans(),
        most_ns=st.floats(0, 2e9),
    )
)


def of_host(step_ns: float) -> Callable[[Edit], float]:
    return lambda edit: edit.host_share * step_ns


@given(FINDINGS, st.floats(1, 1e9), st.floats(0, 1e5))
def test_all_savings_together_are_never_more_than_the_step(
    findings: list[Finding], step_ns: float, margin: float
) -> None:
    advice = weigh(findings, of_host(step_ns), step_ns, margin_ns=margin)
    assert sum(each.saves_ns_per_step for each in advice) <= step_ns * (1 + 1e-9)
    savings = [each.saves_ns_per_step for each in advice]
    assert savings == sorted(savings, reverse=True)
    risks = {each.rule for each in findings if each.risk}
    for each in advice:
        worth_it = each.saves_ns_per_step >= max(MIN_NS, MIN_SHARE * step_ns * (1 - 1e-9))
        assert each.share_of_step == pytest.approx(each.saves_ns_per_step / step_ns)
        assert worth_it or (each.saves_ns_per_step == 0 and each.rule in risks)


def test_what_saves_next_to_nothing_is_not_said() -> None:
    def say(saves: float, step_ns: float, margin: float = 0.0) -> tuple[Advice, ...]:
        edit = Edit(host_share=saves / step_ns)
        return weigh([Finding("r", "e", edit, "c", "s")], of_host(step_ns), step_ns, margin_ns=margin)

    assert say(MIN_NS, MIN_NS)
    assert not say(MIN_NS - 1, MIN_NS)
    assert say(MIN_NS / MIN_SHARE, MIN_NS / MIN_SHARE)
    assert not say(MIN_NS, MIN_NS / MIN_SHARE * 1.01)
    assert say(3 * MIN_NS, 4 * MIN_NS, MIN_NS)
    assert not say(3 * MIN_NS, 4 * MIN_NS, 2.1 * MIN_NS)


def test_ranks_with_one_problem_are_one_piece_of_advice() -> None:
    def advice(rule: str, saves: float) -> Advice:
        return Advice(rule, f"{rule} {saves}", saves, saves / 100, "c", "s")

    found = gather(
        [(3, [advice("a", 10), advice("b", 5)]), (0, [advice("a", 20)]), (None, [advice("c", 15)])]
    )
    assert [(each.rule, each.saves_ns_per_step, each.ranks) for each in found] == [
        ("a", 20, (0, 3)),
        ("c", 15, ()),
        ("b", 5, (3,)),
    ]
    assert found[0].evidence == "a 20"


def test_gather_rank_that_loses_little_by_it_is_not_named() -> None:
    """One rank's loader is slow: its peer waits 5.2 ms a step for data and loses nothing by that."""

    def data(saves_ms: float) -> list[Advice]:
        return [Advice("loader-workers", f"{saves_ms} ms", saves_ms * MS, saves_ms / 166, "c", "s")]

    (found,) = gather([(0, data(5.2)), (1, data(131))])
    assert (found.ranks, found.evidence, found.saves_ns_per_step) == ((1,), "131 ms", 131 * MS)
    (found,) = gather([(0, data(129)), (1, data(131)), (2, data(60)), (3, data(66))])
    assert found.ranks == (0, 1, 3)


def test_gather_risk_that_costs_nothing_yet_names_all_its_ranks() -> None:
    (found,) = gather([(rank, [Advice("memory", "e", 0.0, 0.0, "c", "s")]) for rank in (0, 2)])
    assert found.ranks == (0, 2)


def test_the_last_to_come_to_an_exchange_shows_what_it_costs() -> None:
    def waits(saves: float, rule: str = "gradient-accumulation") -> list[Advice]:
        return [Advice(rule, f"{saves}", saves, saves / 100, "c", "s")]

    (found,) = gather([(0, waits(50)), (1, waits(20))])
    assert (found.evidence, found.ranks, found.saves_ns_per_step) == ("20", (0, 1), 20)
    assert gather([(0, waits(50)), (1, [])]) == ()
    assert gather([(0, waits(50, "float64")), (1, [])])[0].saves_ns_per_step == 50


@given(st.data())
def test_self_times_are_those_of_a_walk_over_the_tree(data: st.DataObject) -> None:
    """Work and overhead, against a tree grown here whose own times are known beforehand."""
    events: list[str] = []
    expected: list[tuple[int, int]] = []

    def grow(start: int, depth: int) -> int:
        own = data.draw(st.integers(0, 9)) * US
        at, children = start + own, data.draw(st.integers(0, 3 if depth < 3 else 0))
        place = len(expected)
        expected.append((0, 0))
        for _ in range(children):
            at = grow(at, depth + 1) + 1
        end = at + 1
        expected[place] = (depth, own + 1 + children - children * EVENT_NS)
        events.append(traces.event("aten::x", start, end))
        return end

    at = 0
    for _ in range(data.draw(st.integers(1, 4))):
        at = grow(at, 0) + 1
    trace = traces.trace_of([step(1, 0, at + 1), *events])
    found = analysis.steps(trace)
    context = AdviceContext(trace, found, analysis.DeviceTime(trace).within([(0, at + 1)]), None)
    calls = context.calls
    assert calls.depth.tolist() == [depth for depth, _ in expected]
    assert calls.work_ns.tolist() == [max(own - DISPATCH_NS, 0) for _, own in expected]
    inner = calls.depth > 0
    assert (calls.work_ns + calls.overhead_ns)[inner].tolist() == [own for depth, own in expected if depth]
    assert context.outer.work_ns.sum() == calls.work_ns.sum()
    assert context.outer.overhead_ns.sum() == calls.overhead_ns.sum()


def test_the_recording_is_taken_off_by_kind() -> None:
    events = [
        step(1, 0, MS),
        traces.event("aten::mm", 0, 500 * US, args={"Input Dims": [[2, 2]]}),
        traces.event("train.py(1): f", 0, MS, cat="python_function"),
    ]
    trace = with_memory(events, 0, 0)
    context = AdviceContext(trace, analysis.steps(trace), analysis.DeviceTime(trace).within([(0, MS)]), None)
    recorded = 2 * (EVENT_NS + SHAPES_NS + AFTER_NS) + FRAME_NS + MEMORY_NS
    assert context.recording(np.array([0]), np.array([MS])).tolist() == [recorded]
    assert context.step_ns == MS - recorded


def scaled(*events: str, unrecorded_ns: object, steps: int = 1, last_ns: int = MS) -> AdviceContext:
    """The context of steps of 1 ms, but for the last, each with 400 operators."""
    return context_of(*events, unrecorded_ns=unrecorded_ns, lengths=[*[MS] * (steps - 1), last_ns])


def context_of(*events: str, unrecorded_ns: object, lengths: list[int]) -> AdviceContext:
    """The context of steps of these lengths, one after another, each with 400 operators."""
    ends = np.cumsum(lengths).tolist()
    starts = [0, *ends[:-1]]
    operators = [
        traces.event("aten::mm", start + number * US, start + number * US + 500)
        for start in starts
        for number in range(400)
    ]
    marks = [step(at, start, end) for at, (start, end) in enumerate(zip(starts, ends, strict=True))]
    trace = traces.trace_of([*marks, *operators, *events], torchperfd={"unrecorded_step_ns": unrecorded_ns})
    found = analysis.steps(trace)
    spans = [(each.start_ns, each.start_ns + each.duration_ns) for each in found]
    return AdviceContext(trace, found, analysis.DeviceTime(trace).within(spans), None)


EXPECTED_NS = 401 * (EVENT_NS + AFTER_NS)
"""What recording one of these steps is expected to cost."""


@pytest.mark.parametrize("times", [0.6, 1.0, 2.0])
def test_earlier_steps_give_the_recording_speed(times: float) -> None:
    context = scaled(unrecorded_ns=round(MS - times * EXPECTED_NS), steps=2)
    weight = 0.25 / (0.25 + (0.03 * MS / EXPECTED_NS) ** 2)
    assert context.step_ns == pytest.approx(MS - (1 + weight * (times - 1)) * EXPECTED_NS, abs=1)
    assert context.step_ns == pytest.approx(MS - times * EXPECTED_NS, rel=0.05)


def test_earlier_steps_that_are_far_shorter_are_not_used() -> None:
    assert scaled(unrecorded_ns=1).step_ns >= MS - 3 * EXPECTED_NS
    assert scaled(unrecorded_ns=10 * MS).step_ns == pytest.approx(MS - EXPECTED_NS / 3, abs=1)


@pytest.mark.parametrize(
    "longer", [[2.0, 2.0, *[4.0] * 6], [1.9, 2.5, *[4.0] * 6], [4.0] * 8], ids=["even", "uneven", "all"]
)
def test_few_steps_without_memory_waits_barely_set_the_cost(longer: list[float]) -> None:
    before = round(MS - EXPECTED_NS)
    context = context_of(unrecorded_ns=before, lengths=[round(times * MS) for times in longer])
    assert context.count == 2
    kept = statistics.fmean(sorted(longer)[:2]) * MS
    assert kept - 1.5 * EXPECTED_NS < context.step_ns <= kept - EXPECTED_NS


@pytest.mark.parametrize("unrecorded_ns", [0, -5])
def test_without_such_a_time_the_usual_cost_is_taken_off(unrecorded_ns: int) -> None:
    assert scaled(unrecorded_ns=unrecorded_ns).step_ns == MS - EXPECTED_NS


def test_a_time_that_is_no_number_costs_the_trace_nothing() -> None:
    assert scaled(unrecorded_ns="soon").step_ns == MS - EXPECTED_NS


@pytest.mark.parametrize(
    ("busy_us", "unrecorded_us", "step_us"), [(1, 300, 300), (1, 0, None), (1, 2000, None), (500, 300, 500)]
)
def test_step_of_a_host_that_launches_is_the_unrecorded_one(
    busy_us: int, unrecorded_us: int, step_us: int | None
) -> None:
    """CUPTI makes every launch longer, which the number of events does not show."""
    context = scaled(kernel("k", 0, busy_us * US), unrecorded_ns=unrecorded_us * US)
    assert context.step_ns == (MS - EXPECTED_NS if step_us is None else step_us * US)


def test_recording_may_overlap_worker_waits() -> None:
    fast = round(MS - 2 * EXPECTED_NS)
    wait = annotation("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", 0, 900 * US)
    waiting = scaled(wait, unrecorded_ns=fast)
    expected = EXPECTED_NS + EVENT_NS + AFTER_NS
    assert MS - 1.1 * expected < waiting.step_ns < MS - expected


def test_steps_that_recording_cannot_explain_are_left_out() -> None:
    before = round(MS - EXPECTED_NS)
    assert scaled(unrecorded_ns=before, steps=4, last_ns=9 * MS).count == 3
    assert scaled(unrecorded_ns=before, steps=4, last_ns=9 * MS).step_ns == pytest.approx(before, abs=1)
    assert scaled(unrecorded_ns=before, steps=4, last_ns=MS + 100 * US).count == 4
    assert scaled(unrecorded_ns=before // 4, steps=8, last_ns=9 * MS).count == 2
    # Without a time of unrecorded steps, one that is far longer than the others is no usual one.
    assert scaled(unrecorded_ns=0, steps=4, last_ns=9 * MS).count == 3


def test_steps_that_wait_for_their_loader_are_not_left_out() -> None:
    wait = annotation("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", 4 * MS, 11 * MS)
    before = round(MS - EXPECTED_NS)
    assert scaled(wait, unrecorded_ns=before, steps=4, last_ns=8 * MS).count == 4


@pytest.mark.parametrize("unrecorded_us", [0, 4_000, 8_000, 16_000, 30_000])
def test_what_is_saved_is_of_steps_that_are_not_recorded(unrecorded_us: int) -> None:
    trace = traces.trace_of(
        doubles("double", "[64, 64]"), torchperfd={"unrecorded_step_ns": unrecorded_us * US}
    )
    found = analysis.steps(trace)
    context = AdviceContext(trace, found, analysis.DeviceTime(trace).within([(0, 10 * MS)]), None)
    (advice,) = analysis.summarise(trace).advice
    longer = context.step_ns / (unrecorded_us * US) if unrecorded_us else 1.0
    inflation = min(max(longer, 0.5), 2.0)
    work = 9 * MS - 2 * DISPATCH_NS - context.recording(np.array([0]), np.array([9 * MS]))[0]
    assert advice.saves_ns_per_step == pytest.approx(work / 2 / inflation, rel=2e-3)
    assert advice.share_of_step == pytest.approx(work / 2 / context.step_ns, rel=2e-3)


def test_text_and_dictionary_say_the_same() -> None:
    advice = [
        Advice("a", "what \x1b shows", 1_500_000, 0.25, "do this", "f(x)", (0, 3)),
        Advice("d", "held up", 900_000, 0.15, "do that", "h(x)", margin_ns=300_000),
        Advice("b", "near", 0, 0, "make room", "g(x)"),
    ]
    assert render(analysis.advice_document(advice)).splitlines() == [
        "Advice",
        "1. do this: saves 1.5 ms a step (25%), on ranks 0,3",
        "   what ? shows",
        "   f(x)",
        "2. do that: saves 600 µs to 1.2 ms a step (15%)",
        "   held up",
        "   h(x)",
        "3. make room: a risk, no time",
        "   near",
        "   g(x)",
    ]
    assert analysis.advice_to_dict(advice)[0] == {
        "rule": "a",
        "ranks": [0, 3],
        "evidence": "what \x1b shows",
        "saves_us_per_step": 1500.0,
        "margin_us_per_step": 0.0,
        "per": "step",
        "share_of_step": 0.25,
        "change": "do this",
        "setting": "f(x)",
    }
    assert render(analysis.advice_document([])) == ""


def test_times_read_well() -> None:
    assert [ns_text(85_400), ns_text(12_345_678)] == ["85.4 µs", "12.3 ms"]


def test_ranks_that_wait_alike_show_the_mean_of_what_they_lose() -> None:
    def waits(saves: float) -> list[Advice]:
        return [Advice("gradient-accumulation", f"{saves}", saves, saves / 100, "c", "s")]

    (found,) = gather([(0, waits(24)), (1, waits(20)), (2, waits(26)), (3, waits(22))])
    assert (found.evidence, found.ranks) == ("20", (0, 1, 2, 3))
    assert found.saves_ns_per_step == pytest.approx(22)
    assert found.share_of_step == pytest.approx(0.22)
    assert gather([(0, waits(0)), (1, waits(0))])[0].saves_ns_per_step == 0
