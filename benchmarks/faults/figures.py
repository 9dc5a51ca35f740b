"""The figures of the suite and of its arms, with their bounds. Pure: trials in, figures out."""

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Final

from benchmarks.faults.arms import ARMS, NAMED, USUAL, Arm
from benchmarks.faults.catalog import HANG
from benchmarks.faults.scoring import Mark, confusion, macro_f1, mark
from benchmarks.faults.trial import Answer, Trial
from benchmarks.judge import Figure

from torchperfd_daemon.diagnosis.verdict import Cause

_NUMBER: Final = "{:.0f}"
_NONE: Final = Cause.NONE.value


def figures(arm: Arm, trials: Sequence[Trial]) -> list[Figure]:
    """Return the figures of the trials that ran. Shares are 0 to 1, nan without a trial to judge."""
    ran = [trial for trial in trials if not trial.failure]
    return _of_suite(ran) if arm is ARMS[USUAL] else _of_arm(arm, ran)


def is_blamed(answer: Answer) -> bool:
    """Return whether an answer about a healthy job says that time is lost; not if too little is known."""
    if answer.cause == Cause.UNKNOWN.value:
        return bool(answer.cost)
    return answer.cause != _NONE


def _of_suite(ran: Sequence[Trial]) -> list[Figure]:
    marks = [mark(trial) for trial in ran]
    healthy = [each for each in marks if each.plan.cause == _NONE]
    faulty = [each for each in marks if each.plan.cause != _NONE]
    hangs = [each for each in faulty if each.plan.cause == HANG]
    slow = [each for each in faulty if each.plan.cause != HANG]
    healthy_answers = [answer for trial in ran if trial.plan.cause == _NONE for answer in trial.answers]
    moments = [is_blamed(answer) for answer in healthy_answers if answer.after_onset >= 0]
    stragglers = [_is_soon(each.rank_seconds) for each in slow if NAMED[each.plan.fault].straggles]
    lasting = [each.seconds for each in faulty if each.seconds is not None]
    costs = [abs(each.cost_error) for each in marks if each.cost_error is not None]
    whatifs = [abs(each.whatif_error) for each in marks if each.whatif_error is not None]
    false_hangs = [
        any(answer.cause == HANG for answer in trial.answers) for trial in ran if trial.plan.cause != HANG
    ]
    classes = len({each.plan.cause for each in marks})
    named = [each.right_rank for each in faulty if each.plan.culprits]
    reported = [each.right_cause and each.right_rank for each in hangs]
    return [
        Figure(f"macro-F1 over {classes} classes", macro_f1(confusion(marks)), "{:.2f}", least=0.95),
        Figure("culprit rank named", _share(named), least=0.98),
        Figure("healthy jobs blamed", _share(not each.right_cause for each in healthy), most=0.01),
        Figure("moments of healthy jobs blamed", _share(moments)),
        _unseen(faulty),
        Figure("stragglers: rank named within 10 s", _share(stragglers), least=0.98),
        Figure("cause and rank right within 10 s", _share(_is_soon(each.seconds) for each in slow)),
        Figure("median time until lastingly right", _median(lasting), "{:.1f} s"),
        Figure("cost within 10 % of the injected", _share(error <= 0.1 for error in costs), least=1),
        Figure("median error of the cost", _median(costs)),
        Figure("what-if within 5 % of the step", _share(error <= 0.05 for error in whatifs), least=1),
        Figure("median error of what-if", _median(whatifs)),
        Figure("hang: culprit named by the verdict", _share(reported), least=0.99),
        Figure("hang: culprit named within 10 s", _share(_is_soon(each.seconds) for each in hangs)),
        Figure("hang: line in the verdict", _share(each.line for each in hangs), least=0.99),
        Figure("hang: culprit apart in the stacks", _share(each.stacks_rank for each in hangs)),
        Figure("hang: line in the stacks", _share(each.stacks_line for each in hangs)),
        Figure("jobs wrongly reported as hanging", sum(false_hangs), _NUMBER, most=0),
    ]


def _of_arm(arm: Arm, ran: Sequence[Trial]) -> list[Figure]:
    marks = [mark(trial) for trial in ran]
    faulty = [each for each in marks if each.plan.cause != _NONE]
    right = [each for each in faulty if each.right_cause]
    errors = [abs(each.cost_error) for each in faulty if each.cost_error is not None]
    healthy = [trial for trial in ran if trial.plan.cause == _NONE]
    last = [trial.answers[-1] for trial in healthy if trial.answers]
    cleared = sum(answer.cause == _NONE for answer in last)
    of_healthy = f"{_NUMBER} of {len(healthy)}"
    first = _share(each.right_cause for each in faulty)
    near = _share(error <= arm.cost_within for error in errors)
    named = _share(each.right_rank for each in right if each.plan.culprits)
    return [
        Figure("cause is the first verdict", first, least=arm.least_right),
        Figure("culprit rank named, of these", named),
        Figure(f"cost within {arm.cost_within:.0%}, of these", near, least=1),
        Figure("median error of the cost", _median(errors)),
        Figure("healthy jobs blamed", sum(map(is_blamed, last)), of_healthy, most=0),
        Figure("healthy jobs answered none", cleared, of_healthy),
        _unseen(faulty),
    ]


def _unseen(faulty: Iterable[Mark]) -> Figure:
    count = sum(each.answered == _NONE for each in faulty)
    return Figure("jobs with a fault, answered none", count, _NUMBER, most=0)


def _is_soon(seconds: float | None) -> bool:
    return seconds is not None and seconds <= 10


def _share(hits: Iterable[bool | None]) -> float:
    """Return the share of hits; None is neither a hit nor a miss."""
    judged = [hit for hit in hits if hit is not None]
    return statistics.fmean(judged) if judged else math.nan


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else math.nan
