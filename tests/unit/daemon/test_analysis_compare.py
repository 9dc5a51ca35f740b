"""Comparing traces: what differs, by how much, and the tests of significance behind it."""

import math
import random
import statistics
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.daemon import traces

from torchperfd.model.significance import holm
from torchperfd_daemon import analysis
from torchperfd_daemon.analysis.comparison_samples import Spread, welch
from torchperfd_daemon.errors import UsageError

# What each operator takes in one step, in ns.
Step = Mapping[str, int]
NAMES = ("aten::mm", "aten::add", "aten::relu", "aten::sum", "aten::copy_")


def recorded(steps: Sequence[Step], *, first: int = 0, slack: int = 10) -> analysis.Summary:
    """Return what is known of a trace whose steps run these operators one after the other.

    Args:
        steps: What each step runs.
        first: The first step's number.
        slack: Host time of a step outside its operators, in ns.
    """
    return analysis.summarise(traces.trace_of(events(steps, first=first, slack=slack)), samples=True)


def events(steps: Sequence[Step], *, first: int = 0, slack: int = 10) -> list[str]:
    found, at = [], 1
    for number, step in enumerate(steps, first):
        begin = at
        for name, length in step.items():
            found.append(traces.event(name, at, at + length))
            at += length
        at += slack
        found.append(traces.event(f"ProfilerStep#{number}", begin, at, cat="user_annotation"))
    return found


def noisy(steps: int, seed: int, scale: Mapping[str, float] | None = None) -> list[dict[str, int]]:
    """Return steps of operators that take 10 to 50 µs, give or take a twentieth."""
    source = random.Random(seed)
    return [
        {
            name: round(10_000 * place * (scale or {}).get(name, 1.0) * source.gauss(1, 0.05))
            for place, name in enumerate(NAMES, 1)
        }
        for _ in range(steps)
    ]


def rows(table: Sequence[analysis.Change]) -> dict[str, analysis.Change]:
    return {row.name: row for row in table}


some_steps = st.lists(
    st.dictionaries(st.sampled_from(NAMES), st.integers(1, 10_000), min_size=1), min_size=1, max_size=6
)


@settings(max_examples=40)
@given(some_steps, some_steps)
def test_values_are_means_per_step_and_differences_add_up(before: list[Step], after: list[Step]) -> None:
    found = analysis.compare([recorded(before)], [recorded(after, first=40)])
    table = rows(found.operators)
    for name in NAMES:
        means = [statistics.fmean(step.get(name, 0) for step in side) for side in (before, after)]
        calls = [statistics.fmean(name in step for step in side) for side in (before, after)]
        if not any(calls):
            assert name not in table
            continue
        row = table[name]
        assert [row.before, row.after] == pytest.approx(means)
        assert [row.calls_before, row.calls_after] == pytest.approx(calls)
        assert (row.status == "new") == (not calls[0])
        assert (row.status == "gone") == (not calls[1])
        assert row.p_value is None or (row.status in ("changed", "same") and 0 <= row.p_value <= 1)
    assert math.fsum(row.difference for row in found.operators) == pytest.approx(found.step.difference)
    assert found.step.before == pytest.approx(statistics.fmean(sum(step.values()) + 10 for step in before))
    assert math.fsum(row.after for row in found.phases) == pytest.approx(found.step.after)
    sizes = [abs(row.difference) for row in found.operators]
    assert sizes == sorted(sizes, reverse=True)
    assert (found.before.steps, found.after.steps) == (len(before), len(after))
    assert found.noise_known == (len(before) > 1 and len(after) > 1)


@settings(max_examples=40)
@given(some_steps)
def test_a_trace_differs_in_nothing_from_itself(steps: list[Step]) -> None:
    summary = recorded(steps)
    found = analysis.compare([summary], [summary])
    assert {row.status for row in (found.step, *found.operators)} == {"same"}
    assert {row.difference for row in (found.step, *found.operators)} == {0.0}
    assert found.causes() == ()


@settings(max_examples=40)
@given(some_steps)
def test_a_renamed_operator_is_gone_and_new(steps: list[Step]) -> None:
    renamed = [{name.replace("mm", "bmm"): length for name, length in step.items()} for step in steps]
    table = rows(analysis.compare([recorded(steps)], [recorded(renamed)]).operators)
    used = any("aten::mm" in step for step in steps)
    if used:
        assert (table["aten::mm"].status, table["aten::bmm"].status) == ("gone", "new")
        assert table["aten::mm"].difference == -table["aten::bmm"].difference
    assert {row.status for name, row in table.items() if "mm" not in name} <= {"same"}
    assert ("aten::bmm" in table) == used


@settings(max_examples=20)
@given(st.sampled_from(NAMES), st.sampled_from([0.5, 1.5, 3.0]), st.integers(0, 1 << 30))
def test_an_operator_that_takes_longer_is_found_and_measured(name: str, factor: float, seed: int) -> None:
    before, after = noisy(10, seed), noisy(14, seed + 1, {name: factor})
    found = analysis.compare([recorded(before)], [recorded(after)])
    row = rows(found.operators)[name]
    assert row.status == "changed"
    usual = 10_000 * (NAMES.index(name) + 1)
    # Four standard errors: of 24 steps each a twentieth from the usual.
    assert row.difference == pytest.approx((factor - 1) * usual, abs=4 * 0.05 * usual * max(1.0, factor))
    assert found.operators[0].name == name
    assert found.causes()[:1] == ((row,) if found.step.status == "changed" else found.causes()[:1])


def test_steps_of_one_run_are_seldom_said_to_differ() -> None:
    comparisons, wrong = 60, 0
    for seed in range(comparisons):
        found = analysis.compare([recorded(noisy(5, 2 * seed))], [recorded(noisy(8, 2 * seed + 1))])
        wrong += any(row.status != "same" for row in found.operators)
    assert wrong <= comparisons * 0.05 + 3 * math.sqrt(comparisons * 0.05 * 0.95)


def test_noise_hides_what_steadiness_shows() -> None:
    steady = [{"aten::mm": 1000 + number % 3} for number in range(8)]
    longer = [{"aten::mm": 1100 + number % 3} for number in range(8)]
    shaky = [{"aten::mm": 500 + 1200 * (number % 2)} for number in range(8)]
    assert (
        rows(analysis.compare([recorded(steady)], [recorded(longer)]).operators)["aten::mm"].status
        == "changed"
    )
    assert (
        rows(analysis.compare([recorded(steady)], [recorded(shaky)]).operators)["aten::mm"].status == "same"
    )


def test_what_is_certain_and_tiny_is_no_change() -> None:
    before = [{"aten::mm": 1_000_000, "aten::add": 100}] * 4
    after = [{"aten::mm": 1_000_000, "aten::add": 1000}] * 4
    row = rows(analysis.compare([recorded(before)], [recorded(after)]).operators)["aten::add"]
    assert (row.p_value, row.status) == (0.0, "same")


@pytest.mark.parametrize(
    ("before", "after", "status"),
    [(1000, 1050, "same"), (1000, 1120, "changed"), (1000, 900, "changed")],
)
def test_a_lone_step_goes_by_the_plain_threshold(before: int, after: int, status: str) -> None:
    found = analysis.compare([recorded([{"aten::mm": before}])], [recorded([{"aten::mm": after}] * 3)])
    row = rows(found.operators)["aten::mm"]
    assert (found.noise_known, row.p_value, row.status) == (False, None, status)


def test_what_is_small_beside_a_lone_step_is_no_change() -> None:
    before = [{"aten::mm": 100_000, "aten::add": 100}]
    after = [{"aten::mm": 100_000, "aten::add": 200}]
    assert (
        rows(analysis.compare([recorded(before)], [recorded(after)]).operators)["aten::add"].status == "same"
    )


def test_without_steps_whole_recordings_are_compared() -> None:
    flat = [traces.event("aten::mm", 1, 1001), traces.event("aten::add", 2000, 2500)]
    whole = analysis.summarise(traces.trace_of(flat), samples=True)
    stepped = recorded([{"aten::mm": 400}, {"aten::mm": 600}])
    alone = analysis.compare([whole], [whole])
    assert (alone.per_step, alone.before.steps, alone.step.before) == (False, 0, 2499)
    mixed = analysis.compare([stepped], [whole])
    assert (mixed.per_step, mixed.before.steps) == (False, 0)
    table = rows(mixed.operators)
    assert (table["aten::mm"].before, table["aten::mm"].after, table["aten::mm"].status) == (
        1000,
        1000,
        "same",
    )
    assert (table["aten::add"].status, table["aten::add"].after) == ("new", 500)
    # Both steps with what they take outside operators, against the time from first to last event.
    assert (mixed.step.before, mixed.step.after) == (1020, 2499)


def test_ranks_are_compared_singly_and_by_mean_of_shared_steps() -> None:
    before = [recorded([{"aten::mm": 100}] * 3), recorded([{"aten::mm": 300}] * 3, first=1)]
    after = [recorded([{"aten::mm": 100}] * 4), recorded([{"aten::mm": 700}] * 4)]
    found = analysis.compare(before, after, ranks=[4, 5])
    assert (found.before.steps, found.after.steps) == (2, 4)
    assert (found.operators[0].before, found.operators[0].after) == (200, 400)
    assert [(rank, step.before, step.after) for rank, step in found.ranks] == [(4, 110, 110), (5, 310, 710)]


def launching(number: int, kernel_ns: int, late: int, step_ns: int) -> list[str]:
    """Return one step that launches a kernel, which runs ``late`` ns after the step's start."""
    begin = step_ns * number + 1
    linked = {"External id": number + 1}
    return [
        traces.event(f"ProfilerStep#{number}", begin, begin + step_ns, cat="user_annotation"),
        traces.event("aten::mm", begin + 100, begin + 600, args=linked),
        traces.event("gemm", begin + late, begin + late + kernel_ns, cat="kernel", thread=7, args=linked),
    ]


def on_device(*kernels: int, late: int = 0, step_ns: int = 10_000) -> analysis.Summary:
    text = [each for number, ns in enumerate(kernels) for each in launching(number, ns, late, step_ns)]
    return analysis.summarise(traces.trace_of(text), samples=True)


def test_a_kernel_counts_to_the_step_that_launched_it() -> None:
    # Every kernel runs two steps late; the last ones run after the last step.
    found = analysis.compare(
        [on_device(6000, 6004, 6002, late=20_000)], [on_device(8000, 8004, 8002, late=0)]
    )
    for table in (found.kernels, found.launched):
        assert [(row.before, row.after, row.calls_before) for row in table if row.before] == [(6002, 8002, 1)]
    assert [row.name for row in found.kernels] == ["gemm"]
    assert [row.name for row in found.launched] == ["aten::mm"]


def test_a_busy_device_explains_the_step_by_its_kernels() -> None:
    after = on_device(9000, 9010, 9020, step_ns=11_000)
    found = analysis.compare([on_device(8000, 8010, 8020)], [after])
    assert found.step.status == "changed"
    assert [row.name for row in found.causes()] == ["gemm"]
    parts = rows(found.device)
    assert (parts["compute"].before, parts["compute"].after) == (8010, 9010)
    assert "comm" not in parts


def test_memory_is_what_steps_allocate_and_the_most_they_hold() -> None:
    def with_memory(changes: Sequence[tuple[int, int, int]]) -> analysis.Summary:
        text = events([{"aten::mm": 90}, {"aten::mm": 90}])
        for at, size, device in changes:
            args = f'{{"Bytes": {size}, "Device Type": {device}}}'
            start = traces.microseconds(traces.ORIGIN_NS + at)
            text.append(
                f'{{"ph": "i", "name": "[memory]", "pid": 1, "tid": 1, "ts": {start}, "args": {args}}}'
            )
        return analysis.summarise(traces.trace_of(text), samples=True)

    # Steps are [1, 101) and [101, 201).
    before = with_memory(
        [(10, 100, 0), (20, -100, 0), (30, 50, 0), (110, 300, 0), (120, -300, 0), (130, 8, 1)]
    )
    found = rows(analysis.compare([before], [before]).memory)
    assert {name: row.before for name, row in found.items()} == {
        "host_allocated": (150 + 300) / 2,
        "host_peak": (100 + 350) / 2,
        "device_allocated": 8 / 2,
        "device_peak": 8 / 2,
    }
    more = with_memory([(10, 1000, 0), (120, 1000, 0)])
    assert rows(analysis.compare([before], [more]).memory)["host_allocated"].after == 1000
    assert analysis.compare([before], [recorded([{"aten::mm": 90}] * 2)]).memory == ()


def test_what_cannot_be_compared_is_a_usage_error() -> None:
    summary = recorded([{"aten::mm": 1}])
    plain = analysis.summarise(traces.trace_of(events([{"aten::mm": 1}])))
    for before, after in (([], []), ([summary], []), ([summary], [plain])):
        with pytest.raises(UsageError):
            analysis.compare(before, after)


def spread(*columns: list[float]) -> Spread:
    table = np.array(columns)
    return Spread(table.mean(axis=1), table.var(axis=1, ddof=1), table.shape[1])


def two_sided(t: float, freedom: float) -> float:
    """The area under Student's density beyond ±t, by the midpoint rule over an angle."""
    # With t = sqrt(f) tan(angle) the density becomes cos(angle)^(f - 1), and infinity a right angle.
    edges = np.linspace(math.atan(t / math.sqrt(freedom)), math.pi / 2, 200_001)
    heights = np.cos((edges[1:] + edges[:-1]) / 2) ** (freedom - 1)
    log_scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - math.log(math.pi) / 2
    return float(2 * math.exp(log_scale) * heights.sum() * (edges[1] - edges[0]))


@given(
    st.lists(st.integers(0, 100), min_size=2, max_size=12),
    st.lists(st.integers(0, 100), min_size=2, max_size=12),
)
def test_welch_is_the_area_beyond_t(before: list[float], after: list[float]) -> None:
    left, right = (statistics.variance(side) / len(side) for side in (before, after))
    (chance,) = welch(spread(before), spread(after)).tolist()
    difference = abs(statistics.mean(after) - statistics.mean(before))
    if not left + right:
        assert chance == (0.0 if difference else 1.0)
        return
    t = difference / math.sqrt(left + right)
    freedom = (left + right) ** 2 / (left**2 / (len(before) - 1) + right**2 / (len(after) - 1))
    assert chance == pytest.approx(two_sided(t, freedom), rel=1e-3, abs=1e-6)


@pytest.mark.parametrize(
    ("t", "freedom", "chance"),
    # From the definition: closed forms exist for one and two degrees of freedom, and for none.
    [(1.0, 1, 0.5), (math.sqrt(2), 2, 1 - math.sqrt(0.5)), (0.0, 7, 1.0)],
)
def test_the_closed_forms_come_out(t: float, freedom: int, chance: float) -> None:
    # Two sides of n values with one variance have 2n - 2 degrees of freedom; one without any has n - 1.
    count = freedom + 1
    left = Spread(np.array([0.0]), np.array([float(count)]), count)
    right = Spread(np.array([t]), np.array([0.0]), count)
    assert welch(left, right).tolist() == pytest.approx([chance])


@given(st.lists(st.floats(0, 1), max_size=20), st.floats(0.001, 0.5))
def test_holm_names_rows_from_the_smallest_until_one_fails(chances: list[float], level: float) -> None:
    named: set[int] = set()
    for place, row in enumerate(sorted(range(len(chances)), key=lambda row: chances[row])):
        if chances[row] > level / (len(chances) - place):
            break
        named.add(row)
    assert set(holm(chances, level)) == named


def test_noise_alone_names_a_row_in_fewer_tables_than_the_level() -> None:
    random = np.random.default_rng(17)
    level, tables, wrong = 0.05, 400, 0
    for _ in range(tables):
        # Each row on a scale of its own, as operators are; the sides of different lengths.
        scale = random.lognormal(0, 2, (30, 1))
        before, after = (scale * random.normal(10, 1, (30, count)) for count in (4, 7))
        wrong += bool(holm(welch(spread(*before.tolist()), spread(*after.tolist())).tolist(), level))
    # Three standard deviations of the count above what the level allows.
    assert wrong <= tables * level + 3 * math.sqrt(tables * level * (1 - level))
    assert wrong > 0
