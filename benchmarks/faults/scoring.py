"""How often answers are right. Pure: trials in, figures out."""

import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.faults.arms import NAMED
from benchmarks.faults.catalog import HANG, SIMULATED, Fault, Plan
from benchmarks.faults.trial import Answer, Trial

from torchperfd_daemon.diagnosis.predictions import Removed
from torchperfd_daemon.diagnosis.verdict import Cause

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


@dataclass(frozen=True, slots=True)
class Score:
    """The scores of trials. Shares are 0 to 1, nan without trials.

    Attributes:
        trials: How many count.
        classes: How many classes they are of.
        macro_f1: Over the causes.
        culprit: The share of faults of single ranks whose rank is named.
        blame: The share of healthy jobs with a fault in the last answer.
        moments: The share of answers after the onset's step, in healthy jobs, by which time is lost.
        green: Jobs with a fault of which the last answer is that nothing is wrong.
        false_hangs: Jobs that do not hang and were reported as hanging at any time.
        named_within_10_s: The share of faults of some ranks, step after step, whose rank is named to the end
            within ten seconds.
        within_10_s: The share of faults without a hang whose cause and rank are lastingly right within 10 s.
        median_seconds: Until cause and rank are lastingly right, of those that ever are.
        cost: The share of right causes whose cost is within 10 % of the true one.
        median_cost_error: Unsigned.
        whatif: The share of predicted steps within 5 % of the step of what was measured without the fault.
        median_whatif_error: Unsigned.
        hang: The share of hangs whose culprit the verdict names as one.
        hang_within_10_s: The share of hangs with cause and rank lastingly right within ten seconds.
        hang_line: The share of hangs at a line whose line is in the verdict.
        stacks: The share of hangs whose culprits stand apart in ``stacks``.
        stacks_line: The share of hangs at a line that ``stacks`` shows.
    """

    trials: int
    classes: int
    macro_f1: float
    culprit: float
    blame: float
    moments: float
    green: int
    false_hangs: int
    named_within_10_s: float
    within_10_s: float
    median_seconds: float
    cost: float
    median_cost_error: float
    whatif: float
    median_whatif_error: float
    hang: float
    hang_within_10_s: float
    hang_line: float
    stacks: float
    stacks_line: float


def is_blamed(answer: Answer) -> bool:
    """Return whether an answer about a healthy job says that time is lost; not if too little is known."""
    if answer.cause == Cause.UNKNOWN.value:
        return bool(answer.cost)
    return answer.cause != Cause.NONE.value


def score(trials: Sequence[Trial]) -> Score:
    ran = [trial for trial in trials if not trial.failure]
    marks = [mark(trial) for trial in ran]
    healthy = [each for each in marks if each.plan.cause == Cause.NONE.value]
    faulty = [each for each in marks if each.plan.cause != Cause.NONE.value]
    hangs = [each for each in faulty if each.plan.cause == HANG]
    slow = [each for each in faulty if each.plan.cause != HANG]
    moments = [
        answer
        for trial in ran
        if trial.plan.cause == Cause.NONE.value
        for answer in trial.answers
        if answer.after_onset >= 0
    ]
    seconds = [each.seconds for each in faulty if each.seconds is not None]
    predicted = [abs(each.whatif_error) for each in marks if each.whatif_error is not None]
    errors = [abs(each.cost_error) for each in marks if each.cost_error is not None]
    return Score(
        trials=len(marks),
        classes=len({each.plan.cause for each in marks}),
        macro_f1=macro_f1(confusion(marks)),
        culprit=_share(each.right_rank for each in faulty if each.plan.culprits),
        blame=_share(not each.right_cause for each in healthy),
        moments=_share(map(is_blamed, moments)),
        green=sum(each.answered == Cause.NONE.value for each in faulty),
        false_hangs=sum(
            trial.plan.cause != HANG and any(answer.cause == HANG for answer in trial.answers)
            for trial in ran
        ),
        named_within_10_s=_share(
            each.rank_seconds is not None and each.rank_seconds <= 10
            for each in slow
            if NAMED[each.plan.fault].straggles
        ),
        within_10_s=_share(each.seconds is not None and each.seconds <= 10 for each in slow),
        median_seconds=statistics.median(seconds) if seconds else math.nan,
        cost=_share(error <= 0.1 for error in errors),
        median_cost_error=statistics.median(errors) if errors else math.nan,
        whatif=_share(error <= 0.05 for error in predicted),
        median_whatif_error=statistics.median(predicted) if predicted else math.nan,
        hang=_share(each.right_cause and each.right_rank for each in hangs),
        hang_within_10_s=_share(each.seconds is not None and each.seconds <= 10 for each in hangs),
        hang_line=_share(each.line for each in hangs if each.line is not None),
        stacks=_share(each.stacks_rank for each in hangs if each.stacks_rank is not None),
        stacks_line=_share(each.stacks_line for each in hangs if each.stacks_line is not None),
    )


def _share(hits: Iterable[bool | None]) -> float:
    found = [bool(hit) for hit in hits]
    return sum(found) / len(found) if found else math.nan
