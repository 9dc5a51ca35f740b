"""Trials as text: one line each while they run, then the matrix and the figures."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Final

from benchmarks.faults.catalog import Plan
from benchmarks.faults.scoring import Score, confusion, mark, score
from benchmarks.faults.trial import Trial

_ROW: Final = "{:<24} {:<17} {:>4} {:>8} {:>8} {:>8} {:>8}  {:<22} {:>4} {:>8} {:>7} {:>7}  {}"


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


def figures(result: Score) -> str:
    """Return the figures of trials, with the bounds."""
    rows = (
        (f"macro-F1 over {result.classes} classes", _ratio(result.macro_f1), ">= 0.95"),
        ("culprit rank named", _percent(result.culprit), ">= 98 %"),
        ("healthy jobs blamed", _percent(result.blame), "<= 1 %"),
        ("moments of healthy jobs blamed", _percent(result.moments), ""),
        ("jobs with a fault, answered none", str(result.green), "0"),
        ("stragglers: rank named within 10 s", _percent(result.named_within_10_s), ">= 98 %"),
        ("cause and rank right within 10 s", _percent(result.within_10_s), ""),
        ("median time until lastingly right", _seconds(result.median_seconds), ""),
        ("cost within 10 % of the injected", _percent(result.cost), "all"),
        ("median error of the cost", _percent(result.median_cost_error), ""),
        ("what-if within 5 % of the step", _percent(result.whatif), "all"),
        ("median error of what-if", _percent(result.median_whatif_error), ""),
        ("hang: culprit named by the verdict", _percent(result.hang), ">= 99 %"),
        ("hang: culprit named within 10 s", _percent(result.hang_within_10_s), ""),
        ("hang: line in the verdict", _percent(result.hang_line), ">= 99 %"),
        ("hang: culprit apart in the stacks", _percent(result.stacks), ""),
        ("hang: line in the stacks", _percent(result.stacks_line), ""),
        ("jobs wrongly reported as hanging", str(result.false_hangs), "0"),
    )
    return "\n".join(f"{name:<38} {value:>8}   {wanted}".rstrip() for name, value, wanted in rows)


def summary(title: str, trials: Sequence[Trial]) -> str:
    result = score(trials)
    failed = len(trials) - result.trials
    first = f"{title}: {result.trials} jobs" + (f", {failed} not scored" if failed else "")
    if not result.trials:
        return first
    marks = [mark(trial) for trial in trials if not trial.failure]
    return "\n".join([first, "", matrix(confusion(marks)), "", figures(result)])


def wrong(result: Score) -> list[str]:
    """Return the bounds that are missed; figures without trials are not judged."""
    bounds = (
        (f"macro-F1 is {_ratio(result.macro_f1)}, at least 0.95 wanted", result.macro_f1 < 0.95),
        (f"{_percent(result.culprit)} of culprits named, at least 98 % wanted", result.culprit < 0.98),
        (
            f"{_percent(result.named_within_10_s)} of stragglers named within 10 s, at least 98 % wanted",
            result.named_within_10_s < 0.98,
        ),
        (f"{_percent(result.blame)} of healthy jobs blamed, at most 1 % wanted", result.blame > 0.01),
        (f"{result.green} jobs with a fault answered none", result.green > 0),
        (f"{_percent(result.cost)} of costs within 10 %, all wanted", result.cost < 1),
        (f"{_percent(result.whatif)} of what-ifs within 5 %, all wanted", result.whatif < 1),
        (f"{_percent(result.hang)} of hangs reported, at least 99 % wanted", result.hang < 0.99),
        (
            f"{_percent(result.hang_line)} of hangs' lines reported, at least 99 % wanted",
            result.hang_line < 0.99,
        ),
        (f"{result.false_hangs} jobs wrongly reported as hanging", result.false_hangs > 0),
    )
    return [text for text, missed in bounds if missed]


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{share:.0%}"


def _seconds(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1f} s"


def _ratio(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}"
