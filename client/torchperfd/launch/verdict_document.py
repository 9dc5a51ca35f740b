"""The verdict of the daemon as a run's document has it."""

from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchperfd.v1 import control_pb2


def verdict_document(answer: "control_pb2.GetRunResponse | None") -> dict[str, Any] | None:
    """Return the verdict; None if no daemon has answered, or has none."""
    from torchperfd.card import command_after_run

    if answer is None or not answer.HasField("verdict"):
        return None
    verdict = answer.verdict
    return _cause(verdict, verdict.script) | {
        "next_command": command_after_run(verdict.next_command),
        "others": [_cause(other, verdict.script) for other in verdict.others],
    }


def _slow_line(verdict: "control_pb2.Verdict") -> dict[str, Any] | None:
    from torchperfd.slow_line import SlowLine

    if not verdict.HasField("line"):
        return None
    return {each.name: getattr(verdict.line, each.name) for each in fields(SlowLine)}


def _input_stages(verdict: "control_pb2.Verdict") -> dict[str, Any] | None:
    from torchperfd.input_stages import InputStages

    if not verdict.HasField("stages"):
        return None
    return asdict(InputStages(**{field.name: value for field, value in verdict.stages.ListFields()}))


def _cause(verdict: "control_pb2.Verdict", script: str) -> dict[str, Any]:
    from torchperfd.card.script_name import name_script

    return {
        "cause": verdict.cause,
        "summary": verdict.summary,
        "evidence": verdict.evidence,
        "line": _slow_line(verdict),
        "input_stages": _input_stages(verdict),
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
