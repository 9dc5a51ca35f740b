"""Advice: changes to a training script, with the predicted saving and the exact setting.

Each rule states what must be true of the run (`rules.Condition`), reads an `AdviceContext`, the steps of one
trace, and yields findings. `advise` runs the rules whose conditions hold and keeps the findings that save
enough. docs/advice.md lists the conditions and describes each rule.
"""

import math
from dataclasses import replace
from typing import Final

from torchperfd_daemon.analysis.advice import communication, launching, settings, updating
from torchperfd_daemon.analysis.advice.context import AdviceContext
from torchperfd_daemon.analysis.advice.rules import (
    LONG_ENOUGH,
    Advice,
    Per,
    Rule,
    advice_document,
    advice_to_dict,
    gather,
    weigh,
)

__all__ = ["RULES", "Advice", "AdviceContext", "advice_document", "advice_to_dict", "advise", "gather"]

RULES: Final[tuple[Rule, ...]] = (
    *settings.LOADING_RULES,
    *updating.RULES,
    *settings.PRECISION_RULES,
    *launching.RULES,
    *communication.RULES,
    *settings.MEMORY_RULES,
)
_WITHIN: Final = {
    "loader-workers": "data",
    "whole-batches": "data",
    "fused-optimizer": "optimizer",
    "compiled-optimizer": "optimizer",
}
"""Rules that save time of one phase: no more than it takes when nothing is recorded."""


def advise(context: AdviceContext) -> tuple[Advice, ...]:
    """Return the advice for one rank, most time saved first; none if too little is recorded.

    A rule counts only if all its conditions hold for the run.
    """
    if not LONG_ENOUGH.holds(context):
        return ()
    unrecorded = context.trace.unrecorded_phase_ns
    found = [
        replace(finding, most_ns=unrecorded.get(_WITHIN.get(finding.rule, ""), math.inf))
        for rule in RULES
        for finding in rule.apply(context)
    ]
    if not found:
        return ()
    per: Per = "recording" if context.is_whole else "step"
    savings = context.savings
    return weigh(found, savings.of, savings.step_ns, per, savings.margin_ns)
