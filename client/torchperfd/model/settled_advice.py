"""The advice on a run's loaders that was settled once, which every report of the run repeats."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from torchperfd.model.loader_workers import MAX_WORKERS, LoaderAdvice
from torchperfd.v1 import control_pb2

RULES: Final = ("loader-workers", "persistent-workers", "whole-batches")
_LONGEST_S: Final = 1e9
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
        return all(math.isfinite(each) and 0 <= each <= _LONGEST_S for each in seconds)

    def to_dict(self) -> dict[str, Any]:
        """Return it for a JSON document."""
        return asdict(self)

    @classmethod
    def from_dict(cls, document: Any) -> "SettledAdvice | None":
        """Return the advice of a JSON document; None where it has none, or no sound one."""
        try:
            advice = document["advice"]
            found = cls(
                rank=int(document["rank"]),
                workers_now=int(document["workers_now"]),
                step_seconds=float(document["step_seconds"]),
                data_seconds=float(document["data_seconds"]),
                error_seconds=float(document["error_seconds"]),
                advice=None if advice is None else _advice(advice),
            )
        except (TypeError, KeyError, ValueError, OverflowError):
            return None
        return found if found.is_sound() else None

    def to_message(self) -> control_pb2.LoaderAdvice:
        """Return it as a message."""
        message = control_pb2.LoaderAdvice(
            rank=self.rank,
            workers_now=self.workers_now,
            step_seconds=self.step_seconds,
            data_seconds=self.data_seconds,
            error_seconds=self.error_seconds,
        )
        if (advice := self.advice) is not None:
            message.rule, message.workers = advice.rule, advice.workers
            message.advised_step_seconds, message.saves_seconds = advice.step_seconds, advice.saves_seconds
            message.change, message.setting, message.assumes = advice.change, advice.setting, advice.assumes
        return message

    @classmethod
    def from_message(cls, message: control_pb2.LoaderAdvice) -> "SettledAdvice | None":
        """Return the advice of a message; None if it is no sound one."""
        advice = None
        if message.rule:
            advice = LoaderAdvice(
                message.rule,
                message.workers,
                message.advised_step_seconds,
                message.saves_seconds,
                message.change,
                message.setting,
                message.assumes,
            )
        found = cls(
            message.rank,
            message.workers_now,
            message.step_seconds,
            message.data_seconds,
            message.error_seconds,
            advice,
        )
        return found if found.is_sound() else None


def _advice(document: Mapping[str, Any]) -> LoaderAdvice:
    return LoaderAdvice(
        rule=str(document["rule"]),
        workers=int(document["workers"]),
        step_seconds=float(document["step_seconds"]),
        saves_seconds=float(document["saves_seconds"]),
        change=str(document["change"]),
        setting=str(document["setting"]),
        assumes=str(document["assumes"]),
    )
