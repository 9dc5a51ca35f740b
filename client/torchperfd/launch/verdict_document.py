"""The verdict of the daemon as a run's document has it."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchperfd.v1 import control_pb2


def verdict_document(answer: "control_pb2.GetRunResponse | None") -> dict[str, Any] | None:
    """Return the verdict; None if no daemon has answered, or has none."""
    from torchperfd.card import command_after_run
    from torchperfd.step_account import Account

    if answer is None or not answer.HasField("verdict"):
        return None
    verdict = answer.verdict
    account = Account.of_verdict(verdict)
    return _cause(verdict, verdict.script) | {
        "remarks": list(verdict.remarks),
        "next_command": command_after_run(verdict.next_command),
        "unseen_ranks": verdict.unseen_ranks,
        "note": verdict.note or None,
        "account": account.to_document() if account else None,
        "others": [_cause(other, verdict.script) for other in verdict.others],
    }


def loader_advice_document(answer: "control_pb2.GetRunResponse | None") -> dict[str, Any] | None:
    """Return what the run was advised on its loaders; None if that was not settled."""
    from torchperfd.settled_advice import SettledAdvice

    if answer is None or not answer.HasField("loader_advice"):
        return None
    settled = SettledAdvice.of_message(answer.loader_advice)
    return None if settled is None else settled.to_dict()


def _cause(verdict: "control_pb2.Verdict", script: str) -> dict[str, Any]:
    from torchperfd.card.script_name import name_script
    from torchperfd.input_stages import InputStages
    from torchperfd.slow_line import SlowLine

    line = SlowLine.of_verdict(verdict)
    stages = InputStages.of_message(verdict.stages) if verdict.HasField("stages") else None
    return {
        "cause": verdict.cause,
        "summary": verdict.summary,
        "evidence": verdict.evidence,
        "line": asdict(line) if line else None,
        "input_stages": asdict(stages) if stages else None,
        "rank": verdict.rank if verdict.rank >= 0 else None,
        "node": verdict.node or None,
        "phase": verdict.phase or None,
        "cost_seconds_per_step": verdict.cost_seconds_per_step,
        "step_seconds": verdict.step_seconds or None,
        "stalled_seconds": verdict.stalled_seconds or None,
        "window_seconds": verdict.window_seconds or None,
        "fix": name_script(verdict.fix, script) or None,
        "saves_seconds": verdict.saves_seconds or None,
    }
