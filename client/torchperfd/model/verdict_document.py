"""The verdict as a document: its fields, taken from the message and read back into one.

Commands and the live page show all fields. The report that a run leaves has those that later readers need.
"""

from dataclasses import asdict
from typing import Any, Final

from torchperfd.model.card import card_of, command_after_run, name_script
from torchperfd.model.loader_facts import InputStages
from torchperfd.model.source_lines import SlowLine
from torchperfd.model.step_account import Account
from torchperfd.model.values import MAX_INT, count, number, text
from torchperfd.v1 import control_pb2

_IN_REPORTS: Final = (
    "cause",
    "summary",
    "evidence",
    "line",
    "input_stages",
    "rank",
    "node",
    "phase",
    "cost_seconds_per_step",
    "step_seconds",
    "stalled_seconds",
    "window_seconds",
    "fix",
    "saves_seconds",
)
"""The fields of a cause in a report, in their order."""


def verdict_to_document(verdict: control_pb2.Verdict) -> dict[str, Any]:
    """Return a verdict as the versioned documents have it, with the causes beside it, and its card."""
    return {
        **_cause(verdict, verdict.script),
        "others": [_cause(other, verdict.script) for other in verdict.others],
        "note": verdict.note or None,
        "account": _account(verdict),
        "card": card_of(verdict).to_dict(),
    }


def verdict_to_report(verdict: control_pb2.Verdict) -> dict[str, Any]:
    """Return a verdict as the report of a run has it, once the run has ended."""
    causes = [_cause(each, verdict.script) for each in (verdict, *verdict.others)]
    first, *others = [{name: cause[name] for name in _IN_REPORTS} for cause in causes]
    return first | {
        "remarks": list(verdict.remarks),
        "next_command": command_after_run(verdict.next_command),
        "unseen_ranks": verdict.unseen_ranks,
        "note": verdict.note or None,
        "account": _account(verdict),
        "others": others,
    }


def verdict_from_report(kept: dict[str, Any], run: str, step_seconds: float) -> control_pb2.Verdict:
    """Return the message that the verdict of a report was kept from, as far as its card needs it.

    Args:
        kept: As :func:`verdict_to_report` returns it; reports of older versions lack the node, the evidence,
            and the step that the cost is a part of.
        run: The run's name.
        step_seconds: The run's step, for verdicts without one; 0 if unknown.

    Raises:
        ValueError: It is damaged, as with ``KeyError``, ``TypeError`` and ``AttributeError``.
    """
    verdict = _read_cause(kept, run, step_seconds)
    verdict.remarks.extend(text(each) for each in kept.get("remarks") or ())
    verdict.others.extend(_read_cause(each, run, step_seconds) for each in kept.get("others") or ())
    verdict.note = text(kept.get("note"))
    if kept.get("account") is not None:
        Account.from_document(kept["account"]).fill_message(verdict.account)
    return verdict


def _cause(verdict: control_pb2.Verdict, script: str) -> dict[str, Any]:
    line = SlowLine.from_verdict(verdict)
    stages = InputStages.from_message(verdict.stages) if verdict.HasField("stages") else None
    return {
        "run": verdict.run,
        "cause": verdict.cause,
        "node": verdict.node or None,
        "rank": verdict.rank if verdict.rank >= 0 else None,
        "phase": verdict.phase or None,
        "evidence": verdict.evidence,
        "line": asdict(line) if line else None,
        "input_stages": asdict(stages) if stages else None,
        "cost_seconds_per_step": verdict.cost_seconds_per_step,
        "step_seconds": verdict.step_seconds or None,
        "stalled_seconds": verdict.stalled_seconds or None,
        "window_seconds": verdict.window_seconds or None,
        "onset_step": verdict.onset_step if verdict.HasField("onset_step") else None,
        "fix": name_script(verdict.fix, script) or None,
        "saves_seconds": verdict.saves_seconds or None,
        "next_command": verdict.next_command,
        "summary": verdict.summary,
    }


def _read_cause(kept: dict[str, Any], run: str, step_seconds: float) -> control_pb2.Verdict:
    rank, line = kept.get("rank"), kept.get("line")
    return control_pb2.Verdict(
        cause=text(kept["cause"]),
        run=run,
        node=text(kept.get("node")),
        rank=-1 if rank is None else count(rank, MAX_INT),
        evidence=text(kept.get("evidence")) or text(kept.get("summary")),
        cost_seconds_per_step=number(kept.get("cost_seconds_per_step") or 0),
        step_seconds=number(kept.get("step_seconds") or 0) or step_seconds,
        stalled_seconds=number(kept.get("stalled_seconds") or 0),
        window_seconds=number(kept.get("window_seconds") or 0),
        fix=text(kept.get("fix")),
        saves_seconds=number(kept.get("saves_seconds") or 0),
        line=None if line is None else control_pb2.SlowLine(**asdict(SlowLine.from_document(line))),
    )


def _account(verdict: control_pb2.Verdict) -> dict[str, Any] | None:
    account = Account.from_verdict(verdict)
    return account.to_document() if account else None
