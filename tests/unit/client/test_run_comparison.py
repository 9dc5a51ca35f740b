"""What changed between two runs: by phase, beyond noise, and not the machine's speed. Seeds are fixed."""

import json
import math
import random
import re
import statistics
from dataclasses import replace

import pytest
from benchmarks.run_comparison.simulation import PHASES, Noise, simulate
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.accounts import uneven_account
from tests.support.golden import check_golden
from tests.support.run_documents import run_file

from torchperfd.document.markup import render_markdown
from torchperfd.document.terminal import Page, render
from torchperfd.model.significance import compare_means, quantile_95, two_sided
from torchperfd.model.step_account import Account, Part, PartKind
from torchperfd.report.comparison import Difference, RunComparison, compare_runs
from torchperfd.report.ending import Ending
from torchperfd.report.previous_runs import (
    comparison_document,
    findings,
    headline,
    markdown_document,
    people_document,
)
from torchperfd.report.record import RankBlocks, RunFileError, RunRecord, read_record

STEPS = 600


def comparison_text(comparison: RunComparison, *, colour: bool = False, width: int | None = None) -> str:
    return render(people_document(comparison), Page(width, colour=colour))


def comparison_markdown(comparison: RunComparison) -> str:
    return render_markdown(markdown_document(comparison))


def pair(
    seed: int, *, planted: dict[str, float] | None = None, speed: float = 1.0, noise: Noise | None = None
) -> RunComparison:
    source = random.Random(seed)
    before = simulate(source, steps=STEPS, noise=noise or Noise())
    after = simulate(source, steps=STEPS, noise=noise or Noise(), planted=planted, speed=speed)
    return compare_runs(replace(before, run="A"), replace(after, run="B"))


def names(comparison: RunComparison) -> list[str]:
    return [phase.name for phase in comparison.changed_phases]


@pytest.mark.parametrize(
    ("t", "freedom", "chance"),
    [(2.228, 10, 0.05), (1.962, 1000, 0.05), (12.706, 1, 0.05), (3.499, 7, 0.01), (0.0, 5, 1.0)],
)
def test_student_chance_is_that_of_the_tables(t: float, freedom: float, chance: float) -> None:
    assert two_sided(t, freedom) == pytest.approx(chance, abs=2e-4)
    assert two_sided(-t, freedom) == two_sided(t, freedom)


@pytest.mark.parametrize("freedom", [5.0, 7.0, 14.0, 100.0])
def test_student_quantile_undoes_the_chance(freedom: float) -> None:
    assert two_sided(quantile_95(freedom), freedom) == pytest.approx(0.05, abs=1e-4)
    assert two_sided(math.inf, freedom) == 0


def test_means_related_neighbours_widen_the_margin() -> None:
    """A walk wanders far from its mean; the same values in any other order do not."""
    source = random.Random(3)
    walk, at = [], 100.0
    for _ in range(256):
        at += source.gauss(0, 1)
        walk.append(at)
    mixed = source.sample(walk, len(walk))
    assert compare_means(walk, walk).margin > 3 * compare_means(mixed, mixed).margin


def test_means_spikes_do_not_hide_a_change() -> None:
    source = random.Random(4)
    before = [source.gauss(10, 0.3) for _ in range(200)]
    after = [source.gauss(10.6, 0.3) for _ in range(200)]
    before[17] = before[90] = after[150] = 400.0
    change = compare_means(before, after)
    assert change.is_clipped
    assert change.chance < 0.001
    assert change.difference == pytest.approx(0.6, abs=0.15)


def test_means_of_noisy_past_show_a_large_gain() -> None:
    """A busy machine's run of 515 ms a step beside one of 103 ms: the noise leaves no doubt of that."""
    source = random.Random(7)
    before = [0.515 * math.exp(source.gauss(0, 1.0) - 0.5) for _ in range(24)]
    after = [0.103 * math.exp(source.gauss(0, 0.3) - 0.045) for _ in range(24)]
    change = compare_means(before, after)
    assert change.chance < 0.001
    assert change.margin < abs(change.difference)


def test_means_equal_constants_are_no_change() -> None:
    assert compare_means([0.0] * 20, [0.0] * 20).chance == 1
    assert compare_means([1.0] * 20, [1.0] * 20).difference == 0


@pytest.mark.parametrize("seed", range(6))
def test_compare_equal_runs_show_no_change(seed: int) -> None:
    comparison = pair(seed)
    assert not comparison.is_changed
    assert names(comparison) == []
    assert not comparison.is_slower_than(0.0)


@pytest.mark.parametrize("phase", PHASES)
def test_compare_planted_phase_is_named(phase: str) -> None:
    comparison = pair(11, planted={phase: 0.05})
    assert names(comparison) == [phase]
    assert comparison.machine_factor is None
    assert comparison.changed_phases[0].share == pytest.approx(0.05, abs=0.02)


def test_compare_slower_machine_blames_no_phase() -> None:
    comparison = pair(5, speed=1.12)
    assert comparison.is_step_changed
    assert not comparison.is_changed
    assert "the machine's speed changed, not the run" in headline(comparison)
    # A model that grew slows down all phases alike, too.
    assert comparison.is_slower_than(0.05)
    assert comparison.machine_factor == pytest.approx(1.12, abs=0.02)
    assert names(comparison) == []
    assert "all phases changed alike, by +1" in comparison_text(comparison)


@pytest.mark.parametrize("speed", [1.0, 1.12])
def test_compare_phases_have_means_of_their_reports(speed: float) -> None:
    """Whatever is compared: saves at each tenth step are spikes, and the machine may have slowed down."""
    comparison = pair(5, speed=speed)
    saves = [0.05 * (number % 10 == 0) * (1 + 4 * (number == 50)) for number in range(150)]
    runs = [
        replace(
            run,
            ranks=tuple(
                replace(rank, blocks=replace(blocks, phases=blocks.phases | {"checkpoint": tuple(saves)}))
                for rank in run.ranks
                if (blocks := rank.blocks) is not None
            ),
        )
        for run in (comparison.before, comparison.after)
    ]
    found = compare_runs(*runs)
    assert (found.machine_factor is not None) == (speed != 1)
    for side, name in enumerate(("before", "after")):
        (rank,) = runs[side].ranks
        assert rank.blocks is not None
        for phase in found.phases:
            assert getattr(phase, name) == pytest.approx(statistics.fmean(rank.blocks.phases[phase.name]))


def test_comparison_of_clipped_phase_says_so() -> None:
    comparison = pair(11, planted={"backward": 0.05})
    phase = comparison.changed_phases[0]
    clipped = replace(phase, mean=replace(phase.mean, is_clipped=True))
    text = comparison_text(replace(comparison, phases=(clipped,)))
    assert "spikes clipped: the change leaves spikes out, A and B do not" in text


def test_compare_slower_machine_and_phase_names_both() -> None:
    comparison = pair(6, speed=1.12, planted={"data": 0.08})
    assert comparison.machine_factor == pytest.approx(1.12, abs=0.03)
    assert names(comparison) == ["data"]
    assert comparison.is_changed


def test_compare_all_alike_with_other_version_is_changed() -> None:
    comparison = replace(pair(5, speed=1.12), differences=(Difference("torch", "2.13.0", "2.14.1"),))
    assert comparison.is_changed
    assert "machine speed, or what differs below" in comparison_text(comparison)


def test_compare_limit_counts_from_the_lower_end() -> None:
    comparison = pair(11, planted={"backward": 0.1})
    assert comparison.is_changed
    lower = comparison.ratio - comparison.ratio_margin
    assert comparison.is_slower_than(lower - 0.001)
    assert not comparison.is_slower_than(lower + 0.001)


def test_compare_change_below_one_percent_is_none() -> None:
    quiet = Noise(drift=0, independent=0, related=0, spikes=0, between=0)
    comparison = pair(1, planted={"forward": 0.008}, noise=quiet)
    assert names(comparison) == []
    assert not comparison.is_changed


def record(**changes: object) -> RunRecord:
    document = run_file("train-1", steps=20, seconds={"forward": 0.03, "data": 0.01}) | changes
    return read_record(json.dumps(document).encode(), "run.json")


def test_compare_too_few_steps_is_a_clear_error() -> None:
    document = run_file("train-2", steps=5, seconds={"forward": 0.03})
    short = read_record(json.dumps(document).encode(), "run.json")
    with pytest.raises(RunFileError, match="run B, train-2, cannot be compared: it has 4 training steps"):
        compare_runs(record(), short)


def test_compare_report_without_blocks_is_a_clear_error() -> None:
    without = replace(record(), ranks=tuple(replace(each, blocks=None) for each in record().ranks))
    with pytest.raises(RunFileError, match="run A, train-1, cannot be compared: it was written by an older"):
        compare_runs(without, record())
    with pytest.raises(RunFileError, match="it has no training steps"):
        compare_runs(record(), replace(without, ranks=()))


TIMES = st.one_of(st.floats(0, 1e12), st.sampled_from([0.0, 1e-320, 1e-90, 1.0]))


@settings(max_examples=50)
@given(st.lists(st.tuples(TIMES, TIMES), min_size=1, max_size=40), st.lists(TIMES, min_size=8, max_size=40))
def test_compare_any_numbers_is_a_result_or_an_error(
    pairs: list[tuple[float, float]], after: list[float]
) -> None:
    """A report that was made up has numbers that no run has."""
    sides = []
    for columns in ({"data": [a for a, _ in pairs], "forward": [b for _, b in pairs]}, {"data": after}):
        step = [max(values) for values in zip(*columns.values(), strict=True)]
        rank = record().ranks[0]
        blocks = RankBlocks(1, tuple(step), {name: tuple(each) for name, each in columns.items()})
        sides.append(replace(record(), ranks=(replace(rank, blocks=blocks),)))
    try:
        comparison = compare_runs(*sides)
    except RunFileError:
        return
    assert comparison_text(comparison)
    assert comparison.step.before > 0


def test_compare_ranks_of_unequal_length_use_what_they_share() -> None:
    ranks = [
        run_file("ddp", steps=steps, seconds={"forward": 0.03}, rank=rank)["ranks"][0]
        for rank, steps in enumerate((20, 14))
    ]
    comparison = compare_runs(record(ranks=ranks), record(ranks=ranks[::-1]))
    assert comparison.step.before == pytest.approx(0.03)
    assert not comparison.is_changed


def test_compare_what_else_differs_is_listed() -> None:
    other = record(host="node-2", versions={"torch": "2.14.0", "python": "3.11.7", "torchperfd": "0.1.0"})
    comparison = compare_runs(record(), other)
    assert [each.words for each in comparison.differences] == [
        "host node-1 → node-2",
        "torch 2.13.0 → 2.14.0",
    ]
    document = comparison_document(comparison)
    assert document["differences"] == [each.words for each in comparison.differences]
    assert document["differing"][1] == {"name": "torch", "before": "2.13.0", "after": "2.14.0"}
    assert document["after"]["environment"]["torch"] == "2.14.0"


def test_comparison_document_has_sentences_and_intervals() -> None:
    comparison = pair(8, planted={"backward": 0.1})
    document = comparison_document(comparison)
    assert document["headline"] == headline(comparison)
    assert document["findings"] == findings(comparison)
    (backward,) = (phase for phase in document["phases"] if phase["changed"])
    assert backward["difference_seconds"] == backward["after_seconds"] - backward["before_seconds"]
    assert backward["share_margin"] == pytest.approx(
        backward["margin_seconds"] / document["step"]["before_seconds"]
    )


def test_compare_names_the_slow_rank() -> None:
    def ranks(seconds: list[float]) -> RunRecord:
        documents = [
            run_file("ddp", steps=20, seconds={"forward": each, "collective_wait": 0.06 - each}, rank=rank)
            for rank, each in enumerate(seconds)
        ]
        return record(ranks=[document["ranks"][0] for document in documents], world_size=len(seconds))

    comparison = compare_runs(ranks([0.03, 0.03, 0.03]), ranks([0.03, 0.03, 0.05]))
    assert comparison.slow_ranks == (None, 2)
    assert "slow rank none → 2" in comparison_text(comparison)


def test_comparison_has_the_parts_of_both_steps() -> None:
    comparison = pair(11)
    assert (comparison.parts, comparison.to_dict()["parts"]) == ((), [])
    earlier = uneven_account()
    mended = Account(0.05, 0.05, (*earlier.parts[1:4], Part(PartKind.DATA, "", 0.0098)))
    comparison = replace(
        comparison,
        before=replace(comparison.before, account=earlier),
        after=replace(comparison.after, account=mended),
    )
    first, *_, last = comparison.to_dict()["parts"]
    assert first == {
        "part": "waiting for ranks whose work differs from step to step",
        "before_seconds": 0.0415,
        "after_seconds": 0.0,
    }
    assert last["part"] == "rest"
    assert sum(after for _, _, after in comparison.parts) == pytest.approx(0.05)
    check_golden("run_comparison_account.txt", comparison_text(comparison, width=80) + "\n")
    assert "| waiting for data | 0.000 | 9.800 | +9.80 |" in comparison_markdown(comparison)


def test_comparison_text_and_markdown_are_as_before() -> None:
    comparison = pair(11, planted={"backward": 0.05, "data": -0.03})
    comparison = replace(
        comparison,
        before=replace(comparison.before, run="train-3f2a9c1b", verdict="the input takes 15 % of the step"),
        after=replace(comparison.after, run="train-77aa0c12", ending=Ending("failed")),
        differences=(Difference("torch", "2.13.0", "2.14.0"),),
    )
    check_golden("run_comparison.txt", comparison_text(comparison) + "\n")
    check_golden("run_comparison.md", comparison_markdown(comparison))
    assert max(map(len, comparison_text(comparison).splitlines())) <= 80


def test_comparison_text_fits_a_terminal() -> None:
    name = "augment_with_every_augmentation_that_there_is_for_remote_digits"
    comparison = pair(11, planted={"backward": 0.05})
    first, *others = comparison.phases
    comparison = replace(
        comparison,
        before=replace(comparison.before, run="train_remote_digits_of_everyone-5f1bf50a-7c1e", started=1.0),
        phases=(replace(first, name=name), *others),
        differences=(Difference("torch", "2.13.0", "2.14.0"),) * 4,
    )
    text = comparison_text(comparison, width=80)
    assert max(map(len, text.splitlines())) <= 80
    table = next(line for line in text.splitlines() if "…" in line)
    assert table.split()[0].startswith("augment_with_")
    assert table.split()[0].endswith("remote_digits")
    assert table.split()[1:] == comparison_text(comparison).split(name)[-1].split("\n")[0].split()
    for width in (120, 200):
        assert comparison_text(comparison, width=width).split() == comparison_text(comparison).split()


def test_comparison_colours_change_no_word() -> None:
    comparison = pair(11, planted={"backward": 0.15, "data": -0.05})
    coloured = comparison_text(comparison, colour=True)
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == comparison_text(comparison)
    lines = coloured.splitlines()
    assert [line[:7] for line in lines if "backward  " in line] == ["\x1b[1;31m"]
    assert [line[:7] for line in lines if "data  " in line] == ["\x1b[1;32m"]


def test_comparison_document_has_each_phase() -> None:
    comparison = pair(11, planted={"backward": 0.05})
    document = json.loads(json.dumps(comparison.to_dict(), allow_nan=False))
    assert document["schema"] == "torchperfd.run_comparison/1"
    assert {phase["phase"] for phase in document["phases"]} == set(PHASES)
    assert [phase["phase"] for phase in document["phases"] if phase["changed"]] == ["backward"]
    assert document["step"]["ratio"] == pytest.approx(comparison.ratio)


def test_headline_is_one_line() -> None:
    assert headline(pair(2)).endswith(": no change beyond noise")
