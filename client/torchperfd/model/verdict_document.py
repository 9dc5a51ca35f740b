"""The verdict, and the advice on loaders that every report of a run repeats, as documents.

Their fields are taken from the messages and read back into them.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any, Final

from torchperfd.model.card import card_of, command_after_run, name_script
from torchperfd.model.loader_facts import MAX_WORKERS, LoaderAdvice
from torchperfd.model.messages import fill, from_document, pack, unpack
from torchperfd.model.source_lines import InputStages, SlowLine
from torchperfd.model.step_account import Account
from torchperfd.v1 import control_pb2

RULES: Final = ("loader-workers", "persistent-workers", "whole-batches")
_MAX_S: Final = 1e9
_MAX_TEXT: Final = 1000


@dataclass(frozen=True, slots=True)
class SettledAdvice:
    """What a run is advised on its loaders. It is replaced only when steps show that it certainly changed.

    Attributes:
        rank: The rank that waits longest, whose figures these are.
        workers_now: Worker processes that its loader has.
        step_seconds: Its step.
        data_seconds: What of it waits for the loader.
        error_seconds: The standard error of what the advice saves; 0 if unknown.
        advice: None where nothing is certain to save anything.
    """

    rank: int
    workers_now: int
    step_seconds: float
    data_seconds: float
    error_seconds: float = 0.0
    advice: LoaderAdvice | None = None

    @property
    def share(self) -> float:
        """What the advice saves as a part of the step, 0 to 1."""
        return self.advice.saves_seconds / self.step_seconds if self.advice and self.step_seconds else 0.0

    def is_sound(self) -> bool:
        """Return whether a daemon can have written it; it may come from a file."""
        seconds = [self.step_seconds, self.data_seconds, self.error_seconds]
        advice = self.advice
        if advice is not None:
            seconds += [advice.step_seconds, advice.saves_seconds]
            texts = (advice.change, advice.setting, advice.assumes)
            if advice.rule not in RULES or not 0 <= advice.workers <= MAX_WORKERS:
                return False
            if not all(len(each) <= _MAX_TEXT and each.isprintable() for each in texts):
                return False
            if not 0 < advice.saves_seconds <= self.step_seconds:
                return False
        return all(math.isfinite(each) and 0 <= each <= _MAX_S for each in seconds)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, document: Any) -> "SettledAdvice | None":
        """Return the advice of a JSON document; None where it has none, or no sound one."""
        try:
            found = from_document(document, cls)
        except (TypeError, KeyError, ValueError, AttributeError, OverflowError):
            return None
        return found if found.is_sound() else None

    def to_message(self) -> control_pb2.LoaderAdvice:
        message = pack(control_pb2.LoaderAdvice, self)
        if self.advice is not None:
            fill(message, self.advice)
        return message

    @classmethod
    def from_message(cls, message: control_pb2.LoaderAdvice) -> "SettledAdvice | None":
        """Return the advice of a message; None if it is no sound one."""
        advice = unpack(message, LoaderAdvice) if message.rule else None
        found = unpack(message, cls, advice=advice)
        return found if found.is_sound() else None


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


def _cause(verdict: control_pb2.Verdict, script: str) -> dict[str, Any]:
    line = SlowLine.from_verdict(verdict)
    stages = unpack(verdict.stages, InputStages) if verdict.HasField("stages") else None
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


def _account(verdict: control_pb2.Verdict) -> dict[str, Any] | None:
    account = Account.from_verdict(verdict)
    return account.to_document() if account else None
