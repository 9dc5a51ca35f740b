"""What a run's verdict has promised, and what a change of the script has given beside it.

A later run of the same script is recognised by what is kept here.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from torchperfd.model.card import HEALTHY, MIN_SHARE, UNKNOWN
from torchperfd.model.formatting import MAX_NUMBER, duration, number, text
from torchperfd.model.messages import from_document

_ARGUMENT: Final = re.compile(r"\b\w+=[\w.]+")
_CALL: Final = re.compile(r"[\w.]+\([^()]*\)")
_ENDS: Final = re.compile(r"[;:,]| \(")
_FILE: Final = ".py"
_MAX_SETTING: Final = 60
_SETTINGS: Final = {
    "num_workers": re.compile(r"\bnum_workers=(\d+)"),
    "batch_size": re.compile(r"\bbatch_size=(\d+)"),
    "threads": re.compile(r"\b(?:set_num_threads\(|OMP_NUM_THREADS=)(\d+)"),
}
"""Settings of a run that a fix may name, with their values in it."""


@dataclass(frozen=True, slots=True)
class RunSource:
    """What a run has executed, as digests; empty if unknown.

    Attributes:
        path: Of the resolved path of the script.
        code: Of the script and the modules of the user's that it has imported.
        arguments: Of the arguments; so short that they cannot be guessed from it.
    """

    path: str = ""
    code: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Promise:
    """What a named cause costs, and what its fix was predicted to save.

    Attributes:
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
        """Return whether the later run has a setting of the fix that the earlier one had not."""
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
    words = found[0] if found is not None else _ENDS.split(fix, maxsplit=1)[0].strip()[:_MAX_SETTING]
    return "" if _FILE in words else words


CHANGED: Final = "changed"
NOISE: Final = "noise"
MACHINE: Final = "machine"
UNCHANGED: Final = "unchanged"
MINUS: Final = "\N{MINUS SIGN}"
_STATES: Final = (CHANGED, NOISE, MACHINE, UNCHANGED)


@dataclass(frozen=True, slots=True)
class PromiseOutcome:
    """A run beside the earlier one of the same script that promised a gain. Ratios are parts of the step.

    Attributes:
        state: ``changed`` beyond noise; ``noise``; ``machine``, where all phases alike have changed;
            ``unchanged``, where script, arguments and settings are the same, which leaves the rest empty.
        fix: What was to be changed, in a few words; empty if nothing was known.
        promised_ratio: The predicted change of the step, negative; None without a prediction.
        cost_ratio: What the cause cost.
        before_seconds: A step of the earlier run, at the later speed of the machine.
        after_seconds: A step of this run; both are for one sample where the batch sizes differ.
        ratio: The measured change: -0.41 for 41 % less.
        ratio_margin: Half the width of its 95 % confidence interval.
        machine_ratio: The change of all phases alike that is left out of ``before_seconds``; None without.
        is_per_sample: Whether steps of different batch sizes were compared by the sample.
    """

    run: str
    state: str
    cause: str = ""
    fix: str = ""
    promised_ratio: float | None = None
    cost_ratio: float = 0.0
    before_seconds: float = 0.0
    after_seconds: float = 0.0
    ratio: float = 0.0
    ratio_margin: float = 0.0
    machine_ratio: float | None = None
    is_per_sample: bool = False
    has_unseen_ranks: bool = False

    @classmethod
    def of_document(cls, document: Mapping[str, Any] | None) -> "PromiseOutcome | None":
        """Return that of a run's document, made safe for a terminal; None without one.

        Raises:
            KeyError: The run is missing.
            ValueError: A value is of another kind.
        """
        if not document:
            return None
        ratios = {name: _signed(document.get(name)) for name in ("promised_ratio", "machine_ratio")}
        found = from_document(document, cls, ratio=_signed(document.get("ratio")) or 0.0, **ratios)
        if found.state not in _STATES:
            raise ValueError("the outcome of a promise is in no known state")
        return found

    def to_dict(self) -> dict[str, Any]:
        if self.state == UNCHANGED:
            return {"run": self.run, "state": self.state, "words": self.words}
        return asdict(self) | {"words": self.words}

    @property
    def words(self) -> str:
        """What the change gave beside what was promised, for the card; empty where nothing was changed."""
        if self.state == UNCHANGED:
            return ""
        seen = ", as far as ranks were seen" if self.has_unseen_ranks else ""
        return f"your change: {self._measured}{seen}{self._promised}"

    @property
    def details(self) -> str:
        """The earlier run and the uncertainty, for the report of the run."""
        if self.state == UNCHANGED:
            return f"no change since {self.run}"
        margin = f"{100 * self.ratio_margin:.1f} %"
        return f"compared with {self.run}: {100 * self.ratio:+.1f} % ± {margin}".replace("-", MINUS)

    @property
    def cells(self) -> tuple[str, str]:
        """The measured and the promised change for a table; empty where nothing was changed."""
        if self.state == UNCHANGED:
            return "", ""
        measured = {NOISE: "none", MACHINE: "machine"}.get(self.state) or percent(self.ratio)
        is_predicted = self.promised_ratio is not None
        promised = (
            percent(self.promised_ratio or 0.0) if is_predicted else f"cost {100 * self.cost_ratio:.0f} %"
        )
        return measured, promised

    @property
    def _measured(self) -> str:
        if self.state == NOISE:
            return "no change beyond noise"
        alike = " in all phases alike: the machine's speed, or the whole script"
        return f"{percent(self.ratio)} ({self._times}){alike if self.state == MACHINE else ''}"

    @property
    def _times(self) -> str:
        before, after = duration(self.before_seconds), duration(self.after_seconds)
        value, _, unit = before.rpartition(" ")
        times = f"{value if after.endswith(f' {unit}') else before} → {after}"
        unit = " a sample" if self.is_per_sample else ""
        speed = "" if self.machine_ratio is None else ", at the machine's present speed"
        return f"{times}{unit}{speed}"

    @property
    def _promised(self) -> str:
        if self.promised_ratio is None:
            return f"; the cause that was named cost {100 * self.cost_ratio:.0f} %"
        by = f" by {self.fix}" if self.fix else ""
        return f", promised {percent(self.promised_ratio)}{by}"


def percent(ratio: float) -> str:
    """Return a change in percent with its sign: a digit more below 10 %, such as in ``+4.2 %``."""
    size = f"{100 * abs(ratio):.0f}" if abs(ratio) >= 0.0995 else f"{100 * abs(ratio):.1f}"
    return f"{MINUS if ratio < 0 else '+'}{size} %"


def _signed(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_NUMBER:
        raise ValueError("a number is missing or not finite")
    return float(value)
