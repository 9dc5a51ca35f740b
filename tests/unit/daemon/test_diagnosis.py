"""The verdict: its cause, whom it names, and the words that people read."""

import shlex
from dataclasses import asdict, replace

import pytest
from tests.support.golden import check_golden

from torchperfd_daemon.diagnosis.evidence import RankEvidence
from torchperfd_daemon.diagnosis.verdict import Cause, Verdict
from torchperfd_daemon.diagnosis.verdicts import diagnose


def mean_step(rank: int, data: float, step: float = 0.1, steps: int = 50, **phases: float) -> RankEvidence:
    """Return a rank that waits for data for a share of its step and spends the rest going forward."""
    return RankEvidence(
        rank,
        "node-b" if rank > 3 else "node-a",
        step,
        {"data": data * step, "forward": (1 - data) * step, **phases},
        steps=steps,
    )


def own_code(rank: int) -> RankEvidence:
    """Return a rank that spends most of a step of 100 ms in the script's own code."""
    return mean_step(rank, 0.05, forward=0.02, other=0.075)


def ended(ranks: list[RankEvidence], run: str = "bert-17") -> Verdict:
    """Return the verdict on a run that makes no more steps."""
    return diagnose(run, ranks, has_ended=True)


CASES: dict[str, list[RankEvidence]] = {
    "one rank starves": [mean_step(0, 0.02), mean_step(5, 0.5, 0.25), mean_step(2, 0.05)],
    "all ranks starve": [mean_step(0, 0.4), mean_step(1, 0.45), mean_step(2, 0.1)],
    "the only rank starves, slowly": [mean_step(0, 0.75, 4.0)],
    "just enough to compare": [mean_step(0, 0.2)],
    "just not enough to compare": [mean_step(0, 0.199)],
    "nothing stands out": [mean_step(0, 0.05, 0.0123), mean_step(1, 0.03, 0.0125)],
    "script code": [own_code(0)],
    "too early": [mean_step(0, 0.05, steps=3)],
    "no phases": [RankEvidence(0, "node-a", 0.5, steps=3)],
    "no rank has made a step": [RankEvidence(0, "node-a", 0.0), mean_step(1, 0.9, steps=0)],
    "no ranks": [],
}


def test_the_words_are_the_golden_file() -> None:
    lines = []
    for title, ranks in CASES.items():
        verdict = ended(ranks)
        lines += [f"# {title}", verdict.summary]
        lines += [f"    {name}: {value}" for name, value in asdict(verdict).items() if name != "evidence"]
    text = "\n".join(lines) + "\n"
    check_golden("verdicts.txt", text)


def test_the_starving_rank_is_named_with_its_cost() -> None:
    verdict = ended(CASES["one rank starves"])
    assert (verdict.cause, verdict.rank, verdict.node, verdict.phase) == (
        Cause.INPUT_BOUND,
        5,
        "node-b",
        "data",
    )
    assert verdict.cost_seconds_per_step == pytest.approx(0.1215), "what its peers wait is usual"
    assert "rank 5 on node-b" in verdict.summary


def test_no_rank_is_blamed_when_all_starve() -> None:
    verdict = ended(CASES["all ranks starve"])
    assert (verdict.cause, verdict.rank) == (Cause.INPUT_BOUND, None)
    assert "rank" not in verdict.summary


@pytest.mark.parametrize("share", [0.0, 0.0999])
def test_one_rank_that_never_waits_puts_blame_on_the_other(share: float) -> None:
    assert ended([mean_step(0, share), mean_step(1, 0.3)]).rank == 1
    assert ended([mean_step(0, 0.16), mean_step(1, 0.3)]).rank is None


def test_ranks_without_steps_have_no_say() -> None:
    idle = mean_step(7, 0.9, steps=0)
    assert ended([idle, mean_step(1, 0.05)]).cause is Cause.NONE
    assert ended([idle, mean_step(1, 0.5)]).rank is None


def test_longest_phase_of_the_slowest_rank_is_reported() -> None:
    verdict = ended([mean_step(0, 0.1, 1.0), mean_step(1, 0.1, 2.0, backward=1.9)])
    assert (verdict.cause, verdict.phase) == (Cause.NONE, "backward")
    assert "backward is 95% of a 2 s step, data 10%" in verdict.evidence


def test_nothing_seen_means_unknown() -> None:
    expected = Verdict(
        Cause.UNKNOWN, "bert-17", "", None, "", "no training step was seen", 0.0, "torchperfd ps"
    )
    assert ended([]) == ended([RankEvidence(0, "n", 0.0, steps=5)]) == expected


@pytest.mark.parametrize("share", [0.1, 0.9])
def test_next_command_with_any_run_name_is_safe_in_a_shell(share: float) -> None:
    command = ended([mean_step(0, share)], "bert 17; reboot").next_command
    assert shlex.split(command) == ["torchperfd", "capture", "--run", "bert 17; reboot", "--steps", "5"]


def test_script_code_of_a_mean_step_is_the_cause() -> None:
    verdict = ended(CASES["script code"])
    assert (verdict.cause, verdict.rank, verdict.phase) == (Cause.SCRIPT_CODE, None, "other")
    assert verdict.cost_seconds_per_step == 0.075
    assert verdict.evidence == "75 ms of each 100 ms step in the script's own code between the phases"


def test_script_code_beside_a_wait_for_data_is_another_cause() -> None:
    first = ended([mean_step(0, 0.3, forward=0.02, other=0.5 * 0.1)])
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
    verdict = ended([mean_step(0, 0.0, step, forward=(1 - loss) * step, loss=loss * step)])
    assert verdict.cause is cause
    if cause is Cause.SCRIPT_CODE:
        assert verdict.phase == "loss"
        assert verdict.share == pytest.approx(loss)
        assert verdict.evidence.endswith("in the script's own code between the forward and the backward")


@pytest.mark.parametrize(
    ("ranks", "cause"),
    [
        ([replace(own_code(0), hides_script_code=True)], Cause.UNKNOWN),
        ([mean_step(0, 0.05), own_code(1)], Cause.UNKNOWN),
        ([mean_step(0, 0.05, forward=0.08, other=0.015)], Cause.NONE),
    ],
)
def test_script_code_of_one_rank_or_device_is_no_cause(ranks: list[RankEvidence], cause: Cause) -> None:
    assert ended(ranks).cause is cause


@pytest.mark.parametrize(
    ("steps", "step", "is_known"),
    [(1, 6.0, False), (3, 6.0, False), (8, 6.0, True), (19, 0.1, False), (20, 0.001, True)],
)
def test_diagnose_with_few_steps_calls_no_run_healthy(steps: int, step: float, is_known: bool) -> None:
    healthy = ended([mean_step(0, 0.05, step, steps)])
    own = ended([mean_step(0, 0.05, step, steps, forward=0.1 * step, other=0.85 * step)])
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
    young = diagnose("r", [mean_step(0, 0.05, step, steps)])
    assert (young.cause is Cause.NONE) == is_known


def test_diagnose_with_few_steps_reports_a_wait_for_data() -> None:
    assert ended([mean_step(0, 0.5, steps=3)]).cause is Cause.INPUT_BOUND
