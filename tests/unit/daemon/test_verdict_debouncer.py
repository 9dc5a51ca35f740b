"""Verdicts and their figures stay steady until something has changed."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.values import some

from torchperfd.model.step_account import Account
from torchperfd_daemon.diagnosis.evidence import MIN_FINDINGS, WINDOW_SAMPLES
from torchperfd_daemon.diagnosis.verdict import Cause, Verdict
from torchperfd_daemon.observer.verdict_debouncer import HeldFigures, VerdictDebouncer


def verdict(cause: Cause, cost: float = 0.0, rank: int | None = None) -> Verdict:
    return Verdict(cause, "r", "n", rank, "", "", cost, "", step_seconds=1.0)


NONE = verdict(Cause.NONE)


def played(samples: Sequence[Sequence[Verdict]]) -> list[Verdict | None]:
    held = VerdictDebouncer()
    first = []
    for found in samples:
        held.update(found)
        first.append(held.first)
    return first


# Published at the third sample with it, or the second if it has an onset; withdrawn after three without it.
@pytest.mark.parametrize(("onset", "samples"), [(None, 3), (160, 2)])
def test_verdict_is_published_and_withdrawn_after_samples(onset: int | None, samples: int) -> None:
    slow = replace(verdict(Cause.SLOW_RANK, 0.03, 2), onset_step=onset)
    reported = played([[NONE]] * 4 + [[slow]] * (samples + 1) + [[NONE]] * 4)
    assert [each.cause.value if each else "" for each in reported] == (
        ["", "", "none", "none"] + ["none"] * (samples - 1) + ["slow rank"] * 4 + ["none"] * 2
    )


def test_first_verdict_has_the_newest_account_and_note() -> None:
    """Whichever verdict is first: another one had them when its sample was taken."""
    slow, starved = verdict(Cause.SLOW_RANK, 0.03, 2), verdict(Cause.INPUT_BOUND, 0.02)
    held = VerdictDebouncer()
    for seconds in (1.0, 2.0, 3.0):
        account = Account(seconds, seconds, ())
        held.update([replace(starved, account=account, note=f"{seconds:.0f}"), slow])
    first = some(held.first)
    assert (first.cause, first.account, first.note) == (Cause.SLOW_RANK, Account(3.0, 3.0, ()), "3")
    held.update([slow, starved])
    assert held.first is not None
    assert (held.first.account, held.first.note) == (None, "")


def test_intermittent_finding_is_never_published() -> None:
    slow = verdict(Cause.SLOW_RANK, 0.03, 2)
    assert played([[slow], [slow], [NONE]] * 5) == [None] * 15


def test_another_rank_is_another_verdict() -> None:
    samples = [[verdict(Cause.SLOW_RANK, 0.03, index % 2)] for index in range(12)]
    assert played(samples) == [None] * 12


def test_verdict_does_not_outlive_findings_with_changing_ranks() -> None:
    slow = [verdict(Cause.SLOW_RANK, 0.03, 7)] * 3
    samples = [[each] for each in slow] + [[verdict(Cause.CPU_CONTENTION, 0.01, n % 2)] for n in range(4)]
    assert [each is None for each in played(samples)] == [True, True, False, False, False, True, True]


def test_of_two_alike_the_first_stays_first() -> None:
    one, other = verdict(Cause.SLOW_RANK, 0.03, 1), verdict(Cause.INPUT_BOUND, 0.031)
    reported = played([[one]] * 3 + [[one, other]] * 6 + [[one, verdict(Cause.INPUT_BOUND, 0.05)]])
    assert [each.cause if each else None for each in reported[2:]] == [Cause.SLOW_RANK] * 7 + [
        Cause.INPUT_BOUND
    ]


def test_largest_share_is_first_where_steps_differ() -> None:
    """A verdict that a shorter window no longer has is of longer steps."""
    unknown = replace(verdict(Cause.UNKNOWN, 0.05), step_seconds=0.185)
    contention = replace(verdict(Cause.CPU_CONTENTION, 0.04), step_seconds=0.1)
    held = VerdictDebouncer()
    for sample in ([unknown, contention],) * MIN_FINDINGS:
        held.update(sample)
    assert [each.cause for each in held.verdicts] == [Cause.CPU_CONTENTION, Cause.UNKNOWN]


def test_cause_of_all_ranks_leaves_out_the_same_of_one() -> None:
    of_all, of_one = verdict(Cause.CPU_CONTENTION, 0.46), verdict(Cause.CPU_CONTENTION, 0.24, 0)
    held = VerdictDebouncer()
    for sample in ([of_one],) * 3 + ([of_all],) * 3 + ([of_one],) * 2:
        held.update(sample)
    assert held.verdicts == (of_all,)


def test_costs_of_causes_are_each_for_itself() -> None:
    """Each is what removing it would give back: they need not sum to the step."""
    held = VerdictDebouncer()
    contention = verdict(Cause.CPU_CONTENTION, 0.73)
    own = replace(verdict(Cause.SCRIPT_CODE, 0.5), onset_step=1)
    for sample in ([contention],) * 3 + ([own],) * 2:
        held.update(sample)
    assert [each.share for each in held.verdicts] == pytest.approx([0.73, 0.5])


found = st.lists(
    st.builds(
        verdict,
        st.sampled_from([Cause.NONE, Cause.SLOW_RANK, Cause.INPUT_BOUND]),
        st.floats(0, 1),
        st.sampled_from([None, 0, 1]),
    ),
    unique_by=lambda each: (each.cause, each.rank),
    max_size=3,
)


@given(st.lists(found, max_size=30))
def test_published_verdict_has_three_samples_in_a_row(
    samples: list[list[Verdict]],
) -> None:
    """Published verdicts were found in three samples in a row, and missed in fewer since."""
    held = VerdictDebouncer()
    for number, sample in enumerate(samples, start=1):
        before = held.first
        changed = held.update(sample)
        now = held.first
        assert changed == (key(now) != key(before))
        names = {key(each) for old in samples[:number] for each in old}
        holding = {name for name in names if lasted(name, samples[:number])}
        troubles = {name for name in holding if name and name[0] is not Cause.NONE}
        shown = {key(each) for each in held.verdicts}
        assert shown <= (troubles or holding)
        assert {name[0] for name in shown if name} == {name[0] for name in troubles or holding if name}
        assert len({each.cause for each in held.verdicts}) == len(held.verdicts)


def key(each: Verdict | None) -> tuple[Cause, int | None] | None:
    return (each.cause, each.rank) if each else None


def lasted(name: tuple[Cause, int | None] | None, samples: Sequence[Sequence[Verdict]]) -> bool:
    """Return whether a verdict holds, by its definition: going through all samples once more."""
    streak = missed = 0
    holds = False
    for sample in samples:
        if any(key(each) == name for each in sample):
            streak, missed = streak + 1, 0
            holds = holds or streak >= MIN_FINDINGS
        else:
            streak, missed = 0, missed + 1
            holds = holds and missed < MIN_FINDINGS
    return holds


def test_switch_comes_before_the_state_of_the_machine() -> None:
    """What a switch costs is not measured; it is the owner's to change."""
    switch, state = verdict(Cause.DEBUG_SWITCH), verdict(Cause.CPU_CONTENTION, 0.07, 1)
    held = VerdictDebouncer()
    for _ in range(MIN_FINDINGS):
        held.update([switch, state])
    assert [each.cause for each in held.verdicts] == [Cause.DEBUG_SWITCH, Cause.CPU_CONTENTION]


def windows(seconds: int, cost: float, step: float, noise: float, seed: int = 0) -> Iterator[Verdict]:
    """Yield the verdict of each second's window."""
    random = np.random.default_rng(seed)
    newest: deque[tuple[float, float]] = deque(maxlen=WINDOW_SAMPLES)
    for second in range(seconds):
        own = cost * random.lognormal(0, noise)
        newest.append((own, own + (step - cost) * random.lognormal(0, noise)))
        if second < 2:
            continue
        spent, whole = (float(each) for each in np.mean(newest, axis=0))
        evidence = f"waits {spent * 1e3:.1f} ms of each {whole * 1e3:.1f} ms"
        found = Verdict(Cause.INPUT_BOUND, "r", "n", 0, "data", evidence, spent, "", window_seconds=10.0)
        yield replace(found, step_seconds=whole, fix="DataLoader(num_workers=4)", saves_seconds=0.9 * spent)


def figures(verdict: Verdict) -> tuple[float, float, float]:
    return verdict.cost_seconds_per_step, verdict.step_seconds, verdict.saves_seconds


@pytest.mark.parametrize("noise", [0.02, 0.1, 0.3])
def test_steady_loop_changes_its_cost_at_most_once(noise: float) -> None:
    """In ten minutes, after the first whole window; its evidence stays that of the same figures."""
    changes = []
    for seed in range(10):
        found = [*windows(600, 0.064, 0.085, noise, seed)]
        held = HeldFigures(found[0])
        shown = []
        for verdict in found:
            held.update(verdict)
            shown.append(held.verdict)
        settled = shown[2 * WINDOW_SAMPLES :]
        changes.append(sum(figures(a) != figures(b) for a, b in pairwise(settled)))
        for each in settled:
            spent = f"waits {each.cost_seconds_per_step * 1e3:.1f} ms"
            assert each.evidence.startswith(spent)
    assert np.mean(changes) <= 2, changes


@pytest.mark.parametrize(("cost", "step"), [(0.128, 0.149), (0.02, 0.041), (0.064, 0.2)])
def test_change_of_the_run_is_followed_within_a_window(cost: float, step: float) -> None:
    found = [*windows(100, 0.064, 0.085, 0.1)]
    held = HeldFigures(found[0])
    for verdict in found:
        held.update(verdict)
    changed = [*windows(30, cost, step, 0.1, seed=1)]
    for verdict in changed[: WINDOW_SAMPLES + 2]:
        held.update(verdict)
    assert held.verdict.cost_seconds_per_step == pytest.approx(cost, rel=0.15)
    assert held.verdict.step_seconds == pytest.approx(step, rel=0.15)


def test_other_words_are_shown_at_once() -> None:
    first = next(windows(3, 0.064, 0.085, 0.0))
    held = HeldFigures(first)
    held.update(first)
    other = replace(first, fix="DataLoader(num_workers=6)", evidence=f"{first.evidence}; now more")
    held.update(other)
    assert (held.verdict.fix, held.verdict.evidence) == (other.fix, other.evidence)


def test_saving_stays_within_the_held_cost() -> None:
    first = next(windows(3, 0.064, 0.085, 0.0))
    held = HeldFigures(first)
    held.update(first)
    held.update(replace(first, fix="another", saves_seconds=0.0645, cost_seconds_per_step=0.0645))
    assert held.verdict.saves_seconds <= held.verdict.cost_seconds_per_step
