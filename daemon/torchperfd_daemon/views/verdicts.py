"""Verdicts, as ``torchperfd diagnose --json`` has them."""

from dataclasses import asdict
from typing import Any

from torchperfd.card import card_of
from torchperfd.card.script_name import name_script
from torchperfd.input_stages import InputStages
from torchperfd.slow_line import SlowLine
from torchperfd.step_account import Account
from torchperfd.v1 import control_pb2


def verdict_dict(verdict: control_pb2.Verdict) -> dict[str, Any]:
    """Return a verdict as the versioned documents have it, with the causes beside it, and its card."""
    account = Account.of_verdict(verdict)
    return {
        **_one(verdict, verdict.script),
        "others": [_one(other, verdict.script) for other in verdict.others],
        "note": verdict.note or None,
        "account": account.to_document() if account else None,
        "card": card_of(verdict).to_dict(),
    }


def _one(verdict: control_pb2.Verdict, script: str) -> dict[str, Any]:
    line = SlowLine.of_verdict(verdict)
    stages = InputStages.of_message(verdict.stages) if verdict.HasField("stages") else None
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
