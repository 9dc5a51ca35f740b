"""Whether answers are right. Pure: trials in, marks out."""

import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.faults.arms import NAMED
from benchmarks.faults.catalog import SIMULATED, Fault, Plan
from benchmarks.faults.trial import Answer, Trial

from torchperfd_daemon.diagnosis.predictions import Removed

SILENT: Final = "(no answer)"
"""The class of answers that did not come."""

_LINE: Final = re.compile(r"\bjob\.py:(\d+)\b")


@dataclass(frozen=True, slots=True)
class Mark:
    """The score of one trial.

    Attributes:
        answered: The class that was answered.
        right_rank: Whether the rank named is a culprit; that none is named, where all are alike.
        seconds: From the onset to the first of the answers that are right from then on; None: never.
        rank_seconds: The same of the rank alone, whatever the cause; None unless some ranks straggle.
        cost: The true cost in seconds per step; None where a fault has none.
        cost_error: Of the cost answered, as a part of the true one, signed; None unless the cause is right.
        whatif_error: Of the step without the fault as ``whatif`` predicts it, as a part of the step with it,
            signed; None where it cannot be taken out, or was not asked about.
        line: Whether the verdict has a hang's line; None where there is no line.
        stacks_rank: Whether the ranks that stand apart are the culprits; None of trials that do not hang.
        stacks_line: Whether the stacks show a hang's line.
    """

    plan: Plan
    answered: str
    right_rank: bool
    seconds: float | None
    rank_seconds: float | None
    cost: float | None
    cost_error: float | None
    whatif_error: float | None
    line: bool | None
    stacks_rank: bool | None
    stacks_line: bool | None

    @property
    def right_cause(self) -> bool:
        return self.answered == self.plan.cause


def mark(trial: Trial) -> Mark:
    """Return how a trial was answered; the answer is the last one."""
    plan, fault = trial.plan, NAMED[trial.plan.fault]
    last = trial.answers[-1] if trial.answers else None
    cost = true_cost(trial, fault)
    right = last is not None and last.cause == plan.cause
    stands = trial.standstill
    return Mark(
        plan=plan,
        answered=last.cause if last else SILENT,
        right_rank=last is not None and right_rank(plan, last.rank),
        seconds=_seconds_until(
            trial.answers, lambda each: each.cause == plan.cause and right_rank(plan, each.rank)
        ),
        rank_seconds=(
            _seconds_until(trial.answers, lambda each: each.rank in plan.culprits)
            if fault.straggles
            else None
        ),
        cost=cost,
        cost_error=last.cost / cost - 1 if last and last.cost is not None and right and cost else None,
        whatif_error=_whatif_error(trial, fault),
        line=_tells_line(plan, last) if plan.hang_line else None,
        stacks_rank=stands.odd == plan.culprits if stands else None,
        stacks_line=plan.hang_line in stands.lines if stands and plan.hang_line else None,
    )


def true_cost(trial: Trial, fault: Fault) -> float | None:
    """Return what a fault costs by the job's own measurement, seconds per step; None if not by the step.

    That is what was injected, or the growth of the mean step where the job cannot time that. A device works
    through what is queued while its host is delayed: there it is at most that growth. On a busy node it is
    always the growth, since code that uses the CPU costs more there than its own time.
    """
    if not fault.costs:
        return None
    times_itself = fault.times_itself and not trial.plan.hogs
    cost = trial.measured.injected if times_itself else trial.measured.grown
    if trial.plan.device == SIMULATED:
        cost = min(cost, trial.measured.grown)
    return cost if cost > 0 else None


def _whatif_error(trial: Trial, fault: Fault) -> float | None:
    measured = trial.measured
    if fault.removed is None or not trial.predictions or not measured.after:
        return None
    of_rank = fault.removed is Removed.RANK_EXCESS
    wanted = (
        each.step_seconds
        for each in trial.predictions
        if each.removed == fault.removed.value and (not of_rank or each.rank in trial.plan.culprits)
    )
    return (min(wanted, default=measured.after) - measured.without) / measured.after


def right_rank(plan: Plan, rank: int | None) -> bool:
    """Return whether a rank that is named is to blame, or rightly none is."""
    return rank in plan.culprits if plan.culprits else rank is None


def _seconds_until(answers: Sequence[Answer], is_right: Callable[[Answer], bool]) -> float | None:
    """Return since when all answers are right, in seconds from the onset; None: the last is not."""
    since = None
    for answer in answers:
        if answer.after_onset < 0:
            continue
        if not is_right(answer):
            since = None
        elif since is None:
            since = answer.after_onset
    return since


def _tells_line(plan: Plan, answer: Answer | None) -> bool:
    return answer is not None and str(plan.hang_line) in _LINE.findall(answer.evidence)


def confusion(marks: Iterable[Mark]) -> Counter[tuple[str, str]]:
    """Return how often each class was answered to each."""
    return Counter((each.plan.cause, each.answered) for each in marks)


def macro_f1(counts: Counter[tuple[str, str]]) -> float:
    """Return the mean F1 over all classes that are true or answered; nan without trials.

    F1 = 2 * true positives / (2 * true positives + false positives + false negatives).
    """
    classes = {cause for pair in counts for cause in pair}
    scores = []
    for cause in classes:
        hit = counts[cause, cause]
        wrong = sum(n for (true, said), n in counts.items() if (true == cause) != (said == cause))
        scores.append(2 * hit / (2 * hit + wrong))
    return statistics.fmean(scores) if scores else math.nan
