"""The result of ``torchperfd tune``, for people and as JSON."""

from dataclasses import asdict
from typing import Any, Final

from torchperfd.bench.functions_bench import Comparison
from torchperfd.model.formatting import duration
from torchperfd.model.terminal_text import fold_text
from torchperfd.tune.changes import ANY, LOADER, OPTIMIZER, Change
from torchperfd.tune.edits import Edits
from torchperfd.tune.search import Tuning
from torchperfd.tune.trial import ScriptFacts

SCHEMA: Final = "torchperfd.tune/1"
_ENDED: Final = {
    "interrupted": "by Ctrl-C; this is what had been verified until then",
    "time": "by the time limit; this is what had been verified until then (more time: --limit)",
}
_NAMES: Final = len("advised   ")
_UNVERIFIED: Final = {
    "interrupted": "Ctrl-C came before these",
    "time": "the time limit came before these",
}


def tune_text(found: Tuning, edits: Edits, seconds: float, width: int | None = None) -> str:
    """Return the result as lines, without a newline at the end.

    Args:
        found: The result.
        edits: To make it permanent.
        seconds: That it took.
        width: Columns of the terminal; None if the text is not for one. The diff stays whole in any width.
    """
    lines = [fold_text(line, width, margin=_NAMES) for line in _outcome(found, seconds)]
    facts = found.unchanged.facts
    kept = [
        (_code(each.change, facts), f"{gain_words(each.beside)}; {each.losses.words}") for each in found.kept
    ]
    dropped = [(_code(each.change, facts), each.reason) for each in found.dropped]
    for title, rows in (("kept", kept), ("not kept", dropped)):
        if rows:
            lines += ["", title]
            for code, words in rows:
                lines += [fold_text(f"  {code}", width, margin=4), fold_text(f"      {words}", width)]
    if found.skipped:
        lines += ["", "not tried", *(fold_text(f"  {reason}", width) for reason in found.skipped)]
    if found.kept:
        lines += ["", "edit"]
        lines += [f"  {line}" for line in edits.diff.splitlines()]
        lines += [fold_text(f"  {sentence}", width) for sentence in edits.sentences]
    return "\n".join(lines)


def _outcome(found: Tuning, seconds: float) -> list[str]:
    """Return the lines with a name each."""
    lines = [f"took      {duration(seconds)}"]
    if found.ended:
        lines.append(f"ended     {_ENDED[found.ended]}")
    lines.append(f"step      {duration(found.unchanged.step_seconds)}, as the script is")
    if found.total is not None:
        lines.append(f"tuned     {gain_words(found.total)}")
    elif found.kept:
        why = _UNVERIFIED.get(found.ended) or f"these failed: {found.unverified}"
        lines.append(f"tuned     not verified in new processes: {why}")
        lines.append("          the gains below are of one pair of processes for each change")
    else:
        lines.append("tuned     nothing that was tried is certainly faster")
        best = found.best_dropped
        if best is not None and best.beside is not None:
            name = _code(best.change, found.unchanged.facts)
            lines.append(f"best      {name}: {gain_words(best.beside)}")
    if (advice := found.advice) is not None:
        lines.append(f"advised   {advice.setting}, for {duration(advice.step_seconds)} a step,")
        by = f"the card of the run {found.advised_by}" if found.advised_by else "the rule of diagnose"
        lines.append(f"          by {by}")
    if found.repeated == ANY:
        lines.append("losses    not checked: two unchanged runs differ, or no losses were seen")
    return lines


def tune_document(found: Tuning, edits: Edits, seconds: float) -> dict[str, Any]:
    """Return the document of schema ``torchperfd.tune/1``."""
    facts = found.unchanged.facts
    total, advice = found.total, found.advice
    counted = advice if advice is not None and advice.rule == "loader-workers" else None
    return {
        "schema": SCHEMA,
        "step_seconds": found.unchanged.step_seconds,
        "phases_seconds": dict(found.unchanged.phases),
        "is_deterministic": found.repeated != ANY,
        "advice": None if advice is None else asdict(advice),
        "advised_by": found.advised_by or None,
        "advised_workers": counted.workers if counted else None,
        "advised_step_seconds": counted.step_seconds if counted else None,
        "speedup": _speedup(total) if total is not None else None,
        "kept": [
            {
                **each.change.to_dict(),
                "code": _code(each.change, facts),
                "speedup": _speedup(each.beside),
                "losses": each.losses.result,
                "losses_words": each.losses.words,
            }
            for each in found.kept
        ],
        "not_kept": [
            {
                **each.change.to_dict(),
                "code": _code(each.change, facts),
                "reason": each.reason,
                "speedup": _speedup(each.beside) if each.beside is not None else None,
            }
            for each in found.dropped
        ],
        "not_tried": found.skipped,
        "edits": asdict(edits),
        "took_seconds": seconds,
        "is_complete": not found.ended,
        "ended": found.ended or None,
        "unverified": found.unverified or None,
    }


def gain_words(beside: Comparison) -> str:
    """Return how much faster something is, with its interval."""
    return f"{1 / beside.ratio:.2f} times as fast (95 %: {1 / beside.high:.2f} to {1 / beside.low:.2f})"


def _speedup(beside: Comparison) -> dict[str, float]:
    return {"ratio": 1 / beside.ratio, "low": 1 / beside.high, "high": 1 / beside.low}


def _code(change: Change, facts: ScriptFacts) -> str:
    names: tuple[str, ...] = ()
    if change.target == LOADER:
        names = tuple(each.name for each in facts.loaders)
    elif change.target == OPTIMIZER:
        names = tuple(each.name for each in facts.optimizers)
    return change.code(names[0] if len(set(names)) == 1 else "")
