"""What a run's verdict has promised, and by what a later run of the same script is recognised."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from torchperfd.model.card import HEALTHY, MIN_SHARE, UNKNOWN
from torchperfd.runs.values import number, text

_ARGUMENT: Final = re.compile(r"\b\w+=[\w.]+")
_CALL: Final = re.compile(r"[\w.]+\([^()]*\)")
_ENDS: Final = re.compile(r"[;:,]| \(")
_FILE: Final = ".py"
_LONGEST_SETTING: Final = 60
_SETTINGS: Final = {
    "num_workers": re.compile(r"\bnum_workers=(\d+)"),
    "batch_size": re.compile(r"\bbatch_size=(\d+)"),
    "threads": re.compile(r"\b(?:set_num_threads\(|OMP_NUM_THREADS=)(\d+)"),
}
"""Settings of a run that a fix may name, with their values in it."""


@dataclass(frozen=True, slots=True)
class RunSource:
    """What a run has executed, as digests.

    Attributes:
        path: Of the resolved path of the script.
        code: Of the script and the modules of the user's that it has imported; empty if unknown.
        arguments: Of the arguments; so short that they cannot be guessed from it.
    """

    path: str
    code: str
    arguments: str

    @classmethod
    def of_document(cls, document: Mapping[str, Any] | None) -> "RunSource | None":
        """Return that of a run's document; None where its version did not keep it.

        Raises:
            ValueError: A value is no text.
        """
        if not document:
            return None
        return cls(*(text(document.get(name)) for name in ("path", "code", "arguments")))


@dataclass(frozen=True, slots=True)
class Promise:
    """What a named cause costs, and what its fix was predicted to save.

    Attributes:
        cause: Its name.
        fix: What was to be changed, in a few words such as ``num_workers=4``; empty if nothing was known.
        cost: Part of the step that the cause cost, 0 to 1.
        saving: Part of the step that the fix saves, as predicted; None without a prediction.
        settings: Values that the fix names, by setting.
    """

    cause: str
    fix: str
    cost: float
    saving: float | None
    settings: Mapping[str, str]

    def is_kept_by(self, before: Mapping[str, str], after: Mapping[str, str]) -> bool:
        """Return whether the later run has a setting of the fix that the earlier one had not.

        Args:
            before: Settings of the run that promised.
            after: Those of the later run.
        """
        return any(after.get(name) == value != before.get(name) for name, value in self.settings.items())


def promises_of(verdict: Mapping[str, Any], step_seconds: float | None) -> tuple[Promise, ...]:
    """Return what a run's verdict promises, in the order of its card.

    Args:
        verdict: As a run's document has it; empty without one.
        step_seconds: The run's step, for verdicts of older versions, which do not have their own.

    Raises:
        ValueError: A value is missing or of another type.
    """
    found = []
    for each in (verdict, *(verdict.get("others") or ())):
        cause = text(each.get("cause"))
        step = number(each.get("step_seconds") or 0) or step_seconds or 0.0
        if cause in ("", HEALTHY, UNKNOWN) or not step:
            continue
        cost = min(1.0, number(each.get("cost_seconds_per_step") or 0) / step)
        saving = min(1.0, number(each.get("saves_seconds") or 0) / step) or None
        if saving is None and cost < MIN_SHARE:
            continue
        fix = text(each.get("fix"))
        named = {name: match[1] for name, pattern in _SETTINGS.items() if (match := pattern.search(fix))}
        found.append(Promise(cause, short_fix(fix), cost, saving, named))
    return tuple(found)


def short_fix(fix: str) -> str:
    """Return the setting, the call or the first words of a fix; nothing that names a file.

    Other users may read it, and may not see the script.
    """
    found = _ARGUMENT.search(fix) or _CALL.match(fix)
    words = found[0] if found is not None else _ENDS.split(fix, maxsplit=1)[0].strip()[:_LONGEST_SETTING]
    return "" if _FILE in words else words
