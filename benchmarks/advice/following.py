"""Following advice: the advice about a control is applied, and both loops are timed alternately."""

import json
import re
import statistics
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.advice.loops import Loop

from torchperfd_daemon import analysis

NOISE: Final = 0.05
"""Loops that differ by less are as fast."""
PROCESSES: Final = 2  # Where the memory of a process happens to lie changes its steps by several percent.
ROUNDS: Final = 6
CAPTURES: Final = 2
FEWEST: Final = 20  # Steps of a turn.
APPLICABLE: Final = frozenset({"loader-workers", "whole-batches", "fused-optimizer", "zero-grad", "float64"})
"""The rules that a control can follow."""

_WORKERS: Final = re.compile(r"num_workers=(\d+)")


@dataclass(frozen=True, slots=True)
class Followed:
    """One piece of advice on a control, and what came of it.

    Attributes:
        name: The control.
        rule: The advice's rule; empty where there was none.
        setting: The advice's setting.
        step_ms: The control's step.
        predicted: What part of the step the advice was to save.
        saved: What part it did save: the median over all turns. None where it cannot be followed.
    """

    name: str
    rule: str
    setting: str
    step_ms: float
    predicted: float
    saved: float | None

    @property
    def is_wrong(self) -> bool:
        """Whether the advice makes the loop slower, or cannot be followed."""
        return bool(self.rule) and (self.saved is None or self.saved < -NOISE)


def follow(name: str, seconds: float) -> list[Followed]:
    """Return the advice about a control and the saving of each; one entry without a rule for none.

    Args:
        name: The control.
        seconds: How long the loop and each changed one run together.
    """
    by_rule: dict[str, analysis.Advice] = {}
    with Loop(name, "{}") as loop:
        count = _count(loop, seconds)
        step_ms = statistics.median(loop.steps(count)) / 1e6
        for _ in range(CAPTURES):
            # The client samples a draw a second.
            loop.steps(max(FEWEST, round(2.5e3 / step_ms)))
            for advice in loop.record().advice:
                by_rule.setdefault(advice.rule, advice)
    if not by_rule:
        return [Followed(name, "", "", step_ms, 0.0, None)]
    return [_measured(name, advice, seconds, step_ms) for advice in by_rule.values()]


def _measured(name: str, advice: analysis.Advice, seconds: float, step_ms: float) -> Followed:
    change = _change(advice)
    saved = None if change is None else _saved(name, json.dumps(change), seconds)
    return Followed(name, advice.rule, advice.setting, step_ms, advice.share_of_step, saved)


def _change(advice: analysis.Advice) -> dict[str, Any] | None:
    """Return what to do to the control, None where it cannot be done."""
    if advice.rule not in APPLICABLE:
        return None
    workers = _WORKERS.search(advice.setting)
    if advice.rule == "loader-workers":
        return {"workers": int(workers[1])} if workers else None
    return {"rules": [advice.rule]}


def _saved(name: str, change: str, seconds: float) -> float:
    """Return what part of the step a change saves; negative where it makes the step longer."""
    saved = []
    for _ in range(PROCESSES):
        with Loop(name, "{}") as before, Loop(name, change) as after:
            count = _count(before, seconds)
            for _ in range(ROUNDS):
                was, became = statistics.fmean(before.steps(count)), statistics.fmean(after.steps(count))
                saved.append(1 - became / was)
    return statistics.median(saved)


def _count(loop: Loop, seconds: float) -> int:
    """Return how many steps to make in a turn."""
    return max(FEWEST, round(seconds * 1e9 / (2 * PROCESSES * ROUNDS * statistics.median(loop.steps(5)))))
