"""The arms' results: how many jobs of each fault were right, and the arm's bounds."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.faults.arms import Arm
from benchmarks.faults.report import matrix
from benchmarks.faults.scoring import Mark, confusion, is_blamed, mark
from benchmarks.faults.trial import Trial

from torchperfd_daemon.diagnosis.verdict import Cause

_ROW: Final = "{:<30} {:>9}  {}"


@dataclass(frozen=True, slots=True)
class ArmScore:
    """The scores of an arm's jobs. Shares are 0 to 1, nan without jobs.

    Attributes:
        jobs: How many ran.
        failed: How many did not, and are not scored.
        right: The share of jobs with a fault whose cause is the first verdict.
        culprits: The share of faults of single ranks whose rank is named, of those with the right cause.
        costs: The share of right causes whose cost is as near to the true one as the arm wants.
        median_cost_error: Unsigned.
        blamed: Healthy jobs with a cause in their last answer.
        cleared: Healthy jobs of which the last answer is that nothing is wrong.
        healthy: How many healthy jobs ran.
        green: Jobs with a fault of which the last answer is that nothing is wrong.
    """

    jobs: int
    failed: int
    right: float
    culprits: float
    costs: float
    median_cost_error: float
    blamed: int
    cleared: int
    healthy: int
    green: int


def score_arm(arm: Arm, trials: Sequence[Trial]) -> ArmScore:
    ran = [trial for trial in trials if not trial.failure]
    marks = [mark(trial) for trial in ran]
    healthy = [trial for trial in ran if trial.plan.cause == Cause.NONE.value]
    faulty = [each for each in marks if each.plan.cause != Cause.NONE.value]
    errors = [abs(each.cost_error) for each in faulty if each.cost_error is not None]
    named = [each for each in faulty if each.plan.culprits and each.right_cause]
    return ArmScore(
        jobs=len(ran),
        failed=len(trials) - len(ran),
        right=_mean([each.right_cause for each in faulty]),
        culprits=_mean([each.right_rank for each in named]),
        costs=_mean([error <= arm.cost_within for error in errors]),
        median_cost_error=statistics.median(errors) if errors else math.nan,
        blamed=sum(bool(trial.answers) and is_blamed(trial.answers[-1]) for trial in healthy),
        cleared=sum(bool(trial.answers) and trial.answers[-1].cause == Cause.NONE.value for trial in healthy),
        healthy=len(healthy),
        green=sum(each.answered == Cause.NONE.value for each in faulty),
    )


def summary(title: str, arm: Arm, trials: Sequence[Trial]) -> str:
    result = score_arm(arm, trials)
    failed = f", {result.failed} not scored" if result.failed else ""
    first = f"{title}: {arm.question}\n{result.jobs} jobs{failed}"
    if not result.jobs:
        return first
    marks = [mark(trial) for trial in trials if not trial.failure]
    figures = (
        ("cause is the first verdict", _percent(result.right), f">= {arm.least_right:.0%}"),
        ("culprit rank named, of these", _percent(result.culprits), ""),
        (f"cost within {arm.cost_within:.0%}, of these", _percent(result.costs), "all"),
        ("median error of the cost", _percent(result.median_cost_error), ""),
        ("healthy jobs blamed", f"{result.blamed} of {result.healthy}", "0"),
        ("healthy jobs answered none", f"{result.cleared} of {result.healthy}", ""),
        ("jobs with a fault, answered none", str(result.green), "0"),
    )
    lines = [f"{name:<34} {value:>8}   {wanted}".rstrip() for name, value, wanted in figures]
    return "\n".join([first, "", matrix(confusion(marks)), "", by_fault(marks), "", *lines])


def by_fault(marks: Sequence[Mark]) -> str:
    """Return a line for each fault: how many of its jobs are right, and the error of each cost."""
    lines = [_ROW.format("fault", "right", "error of each cost")]
    for name in dict.fromkeys(each.plan.fault for each in marks):
        own = [each for each in marks if each.plan.fault == name]
        right = sum(each.right_cause for each in own)
        errors = ["-" if each.cost_error is None else f"{each.cost_error:+.0%}" for each in own]
        lines.append(_ROW.format(name, f"{right} of {len(own)}", ", ".join(errors)))
    return "\n".join(lines)


def wrong(arm: Arm, result: ArmScore) -> list[str]:
    bounds = (
        (
            f"{_percent(result.right)} of causes right, {arm.least_right:.0%} wanted",
            result.right < arm.least_right,
        ),
        (f"{_percent(result.costs)} of costs within {arm.cost_within:.0%}, all wanted", result.costs < 1),
        (f"{result.blamed} healthy jobs blamed", result.blamed > 0),
        (f"{result.green} jobs with a fault answered none", result.green > 0),
    )
    return [text for text, missed in bounds if missed]


def _mean(hits: Sequence[bool]) -> float:
    return statistics.fmean(hits) if hits else math.nan


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{share:.0%}"
