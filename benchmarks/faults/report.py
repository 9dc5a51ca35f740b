"""Trials as text: one line each while they run, then the matrix and the figures."""

from collections import Counter
from collections.abc import Sequence
from typing import Final

from benchmarks import judge
from benchmarks.faults.arms import ARMS, USUAL, Arm
from benchmarks.faults.catalog import Plan
from benchmarks.faults.figures import figures
from benchmarks.faults.scoring import Mark, confusion, mark
from benchmarks.faults.trial import Trial

_ROW: Final = "{:<24} {:<17} {:>4} {:>8} {:>8} {:>8} {:>8}  {:<22} {:>4} {:>8} {:>7} {:>7}  {}"
_FAULT_ROW: Final = "{:<30} {:>9}  {}"


def head() -> str:
    names = ("fault", "model", "seed", "culprit", "injected", "longer", "cost", "answered", "rank")
    return _ROW.format(*names, "right at", "error", "what-if", "hang's line: verdict, stacks")


def line(trial: Trial) -> str:
    """Return a trial's line: the label, as the job measured it, and the answer.

    Times in ms per step. ``injected`` is what the fault timed of itself, ``longer`` by how much steps grew:
    the first explains the second when the label is true.
    """
    measured = trial.measured
    if trial.failure:
        return f"{_only(trial.plan)} not scored: {trial.failure}"
    own = mark(trial)
    last = trial.answers[-1] if trial.answers else None
    grew = f"{measured.change * 1e3:.1f}" if measured.after and measured.without else "-"
    hang = [_yes(own.line), _yes(own.stacks_line)] if own.line is not None else []
    return _ROW.format(
        *_start(trial.plan),
        f"{measured.injected * 1e3:.1f}",
        grew,
        "-" if last is None or last.cost is None else f"{last.cost * 1e3:.1f}",
        own.answered + ("" if own.right_cause else " (wrong)"),
        "all" if last is None or last.rank is None else last.rank,
        "never" if own.seconds is None else f"{own.seconds:.1f} s",
        "" if own.cost_error is None else f"{own.cost_error:+.0%}",
        "" if own.whatif_error is None else f"{own.whatif_error:+.1%}",
        ", ".join(hang),
    ).rstrip()


def disturbed(trial: Trial) -> str:
    """Return a line on a trial that does not count, because its steps were disturbed."""
    text = f"{_only(trial.plan)} again: others took {trial.others:.0%} of the processors"
    before, healed = trial.measured.before, trial.measured.healed
    if healed is not None:
        text += (
            f", steps without the fault took {before * 1e3:.0f} ms before it and {healed * 1e3:.0f} after it"
        )
    return text


def _start(plan: Plan) -> tuple[str, str, int, str]:
    return plan.fault, plan.model, plan.seed, ",".join(map(str, plan.culprits)) or "all"


def _only(plan: Plan) -> str:
    return _ROW.format(*_start(plan), *[""] * 9).rstrip()


def _yes(fact: bool | None) -> str:
    return "-" if fact is None else "yes" if fact else "no"


def matrix(counts: Counter[tuple[str, str]]) -> str:
    """Return the confusion matrix: a row for each true class, a column for each answer."""
    rows = sorted({true for true, _ in counts})
    columns = sorted({said for _, said in counts})
    letters = [f"{chr(ord('a') + place)}" for place in range(len(columns))]
    lines = [f"{'true, then answered':<24}" + "".join(f"{letter:>4}" for letter in letters)]
    for true in rows:
        cells = [counts[true, said] or "·" for said in columns]
        lines.append(f"{true:<24}" + "".join(f"{cell:>4}" for cell in cells))
    lines += [f"  {letter}: {said}" for letter, said in zip(letters, columns, strict=True)]
    return "\n".join(lines)


def by_fault(marks: Sequence[Mark]) -> str:
    """Return a line for each fault: how many of its jobs are right, and the error of each cost."""
    lines = [_FAULT_ROW.format("fault", "right", "error of each cost")]
    for name in dict.fromkeys(each.plan.fault for each in marks):
        own = [each for each in marks if each.plan.fault == name]
        right = sum(each.right_cause for each in own)
        errors = ["-" if each.cost_error is None else f"{each.cost_error:+.0%}" for each in own]
        lines.append(_FAULT_ROW.format(name, f"{right} of {len(own)}", ", ".join(errors)))
    return "\n".join(lines)


def summary(title: str, arm: Arm, trials: Sequence[Trial]) -> str:
    """Return the results of some jobs: the matrix, a line for each fault of an arm, and the figures."""
    marks = [mark(trial) for trial in trials if not trial.failure]
    failed = len(trials) - len(marks)
    is_usual = arm is ARMS[USUAL]
    about = "" if is_usual else f"{arm.question}\n"
    first = f"{title}: {about}{len(marks)} jobs" + (f", {failed} not scored" if failed else "")
    if not marks:
        return first
    parts = [first, matrix(confusion(marks)), *([] if is_usual else [by_fault(marks)])]
    return "\n\n".join([*parts, "\n".join(judge.rows(figures(arm, trials)))])
