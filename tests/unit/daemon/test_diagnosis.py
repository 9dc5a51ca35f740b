"""The verdict: its cause, whom it names, and the words that people read."""

import shlex
from dataclasses import asdict, replace

import pytest
from tests.support.golden import check_golden

from torchperfd_daemon.diagnosis import Cause, RankProfile, Verdict, diagnose


def profile(rank: int, data: float, step: float = 0.1, steps: int = 50, **phases: float) -> RankProfile:
    """Return a rank that waits for data for a share of its step and spends the rest going forward."""
    return RankProfile(
        rank,
        "node-b" if rank > 3 else "node-a",
        steps,
        step,
        {"data": data * step, "forward": (1 - data) * step, **phases},
        has_ended=True,
    )


def own_code(rank: int) -> RankProfile:
    """Return a rank that spends most of a step of 100 ms in the script's own code."""
    return profile(rank, 0.05, forward=0.02, other=0.075)


CASES: dict[str, list[RankProfile]] = {
    "one rank starves": [profile(0, 0.02), profile(5, 0.5, 0.25), profile(2, 0.05)],
    "all ranks starve": [profile(0, 0.4), profile(1, 0.45), profile(2, 0.1)],
    "the only rank starves, slowly": [profile(0, 0.75, 4.0)],
    "just enough to compare": [profile(0, 0.2)],
    "just not enough to compare": [profile(0, 0.199)],
    "nothing stands out": [profile(0, 0.05, 0.0123), profile(1, 0.03, 0.0125)],
    "script code": [own_code(0)],
    "too early": [profile(0, 0.05, steps=3)],
    "no phases": [RankProfile(0, "node-a", 3, 0.5, {})],
    "no rank has made a step": [RankProfile(0, "node-a", 0, 0.0, {}), profile(1, 0.9, steps=0)],
    "no ranks": [],
}


def test_the_words_are_the_golden_file() -> None:
    lines = []
    for title, ranks in CASES.items():
        verdict = diagnose("bert-17", ranks)
        lines += [f"# {title}", verdict.summary]
        lines += [f"    {name}: {value}" for name, value in asdict(verdict).items() if name != "evidence"]
    text = "\n".join(lines) + "\n"
    check_golden("verdicts.txt", text)


def test_the_starving_rank_is_named_with_its_cost() -> None:
    verdict = diagnose("bert-17", CASES["one rank starves"])
    assert (verdict.cause, verdict.rank, verdict.node, verdict.phase) == (
        Cause.INPUT_BOUND,
        5,
        "node-b",
        "data",
    )
    assert verdict.cost_seconds_per_step == 0.125
    assert "rank 5 on node-b" in verdict.summary


def test_no_rank_is_blamed_when_all_starve() -> None:
    verdict = diagnose("bert-17", CASES["all ranks starve"])
    assert (verdict.cause, verdict.rank) == (Cause.INPUT_BOUND, None)
    assert "rank" not in verdict.summary


@pytest.mark.parametrize("share", [0.0, 0.0999])
def test_one_rank_that_never_waits_puts_blame_on_the_other(share: float) -> None:
    assert diagnose("r", [profile(0, share), profile(1, 0.3)]).rank == 1
    assert diagnose("r", [profile(0, 0.1001), profile(1, 0.3)]).rank is None


def test_ranks_without_steps_have_no_say() -> None:
    idle = profile(7, 0.9, steps=0)
    assert diagnose("r", [idle, profile(1, 0.05)]).cause is Cause.NONE
    assert diagnose("r", [idle, profile(1, 0.5)]).rank is None


def test_longest_phase_of_the_slowest_rank_is_reported() -> None:
    verdict = diagnose("r", [profile(0, 0.1, 1.0), profile(1, 0.1, 2.0, backward=1.9)])
    assert (verdict.cause, verdict.phase) == (Cause.NONE, "backward")
    assert "backward is 95% of a 2 s step, data 10%" in verdict.evidence


def test_nothing_seen_means_unknown() -> None:
    expected = Verdict(Cause.UNKNOWN, "r", "", None, "", "no training step was seen", 0.0, "torchperfd ps")
    assert diagnose("r", []) == diagnose("r", [RankProfile(0, "n", 5, 0.0, {})]) == expected


@pytest.mark.parametrize("share", [0.1, 0.9])
def test_next_command_with_any_run_name_is_safe_in_a_shell(share: float) -> None:
    command = diagnose("bert 17; reboot", [profile(0, share)]).next_command
    assert shlex.split(command) == ["torchperfd", "capture", "--run", "bert 17; reboot", "--steps", "5"]


def test_script_code_of_a_mean_step_is_the_cause() -> None:
    verdict = diagnose("r", CASES["script code"])
    assert (verdict.cause, verdict.rank, verdict.phase) == (Cause.SCRIPT_CODE, None, "other")
    assert verdict.cost_seconds_per_step == 0.075
    assert (
        verdict.evidence == "the script's own code between the phases takes 75 ms of each 100 ms step (75%)"
    )


def test_script_code_beside_a_wait_for_data_is_another_cause() -> None:
    first = diagnose("r", [profile(0, 0.3, forward=0.02, other=0.5 * 0.1)])
    assert (first.cause, [each.cause for each in first.others]) == (Cause.SCRIPT_CODE, [Cause.INPUT_BOUND])


@pytest.mark.parametrize(
    ("loss", "step", "cause"),
    [
        # The script's own Python between the forward and the backward.
        (0.94, 0.119, Cause.SCRIPT_CODE),
        (0.46, 0.03, Cause.SCRIPT_CODE),
        (0.19, 0.1, Cause.NONE),
        # The loss of a small model.
        (0.3, 0.002, Cause.NONE),
        (0.6, 0.002, Cause.UNKNOWN),
    ],
)
def test_long_loss_is_script_code(loss: float, step: float, cause: Cause) -> None:
    verdict = diagnose("r", [profile(0, 0.0, step, forward=(1 - loss) * step, loss=loss * step)])
    assert verdict.cause is cause
    if cause is Cause.SCRIPT_CODE:
        assert verdict.phase == "loss"
        assert verdict.share == pytest.approx(loss)
        assert verdict.evidence.startswith("the script's own code between the forward and the backward takes")


@pytest.mark.parametrize(
    ("ranks", "cause"),
    [
        ([replace(own_code(0), hides_script_code=True)], Cause.UNKNOWN),
        ([profile(0, 0.05), own_code(1)], Cause.UNKNOWN),
        ([profile(0, 0.05, forward=0.08, other=0.015)], Cause.NONE),
    ],
)
def test_script_code_of_one_rank_or_device_is_no_cause(ranks: list[RankProfile], cause: Cause) -> None:
    assert diagnose("r", ranks).cause is cause


@pytest.mark.parametrize(
    ("steps", "step", "is_known"),
    [(1, 6.0, False), (3, 6.0, False), (8, 6.0, True), (19, 0.1, False), (20, 0.001, True)],
)
def test_diagnose_with_few_steps_calls_no_run_healthy(steps: int, step: float, is_known: bool) -> None:
    healthy = diagnose("r", [profile(0, 0.05, step, steps)])
    own = diagnose("r", [profile(0, 0.05, step, steps, forward=0.1 * step, other=0.85 * step)])
    assert (healthy.cause, own.cause) == (
        (Cause.NONE, Cause.SCRIPT_CODE) if is_known else (Cause.UNKNOWN, Cause.UNKNOWN)
    )
    assert is_known or healthy.evidence.startswith(f"too early: {steps} step")


@pytest.mark.parametrize(
    ("steps", "step", "is_known"),
    [
        (149, 0.1, False),
        (150, 0.1, True),
        (22, 1.0, False),
        (23, 1.0, True),
        (15, 5.0, True),
        (13_019, 0.001, False),
    ],
)
def test_diagnose_of_a_young_run_is_too_early(steps: int, step: float, is_known: bool) -> None:
    """Until a window after the warm-up is full, and its findings are published."""
    young = replace(profile(0, 0.05, step, steps), has_ended=False)
    assert (diagnose("r", [young]).cause is Cause.NONE) == is_known


def test_diagnose_with_few_steps_reports_a_wait_for_data() -> None:
    assert diagnose("r", [profile(0, 0.5, steps=3)]).cause is Cause.INPUT_BOUND
