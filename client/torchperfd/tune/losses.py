"""Whether two runs of a script train the same: their losses side by side. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from torchperfd.tune.changes import ANY, BATCHES, CLOSE, EXACT
from torchperfd.tune.trial import Trial

RELATIVE_TOLERANCE: Final = 1e-4
"""Sums in another order differ by so much at most, after a few steps."""
_ABSOLUTE_TOLERANCE: Final = 1e-6
MIN_LOSSES: Final = 3


@dataclass(frozen=True, slots=True)
class LossCheck:
    """How the losses of a run compare with those without a change.

    Attributes:
        result: ``equal``, ``close``, ``differ`` or ``not checked``.
        is_allowed: Whether a change with this result may be kept.
        words: The result in words.
    """

    result: str
    is_allowed: bool
    words: str


def repeats(first: Trial, again: Trial) -> str:
    """Return how an unchanged run repeats itself: ``exact``, ``close``, or ``any`` where it does not."""
    count = min(len(first.losses), len(again.losses))
    if count < MIN_LOSSES:
        return ANY
    if first.losses[:count] == again.losses[:count]:
        return EXACT
    return CLOSE if _are_close(first.losses[:count], again.losses[:count]) else ANY


def check_losses(unchanged: Trial, changed: Trial, required: str, repeated: str) -> LossCheck:
    """Compare the losses of a change with those of the script without it.

    Args:
        unchanged: A run without the change.
        changed: A run with it.
        required: How the losses must compare, of :attr:`Change.losses`.
        repeated: How an unchanged run repeats itself, of :func:`repeats`.
    """
    count = min(len(unchanged.losses), len(changed.losses))
    if repeated == ANY or count < MIN_LOSSES:
        reason = "no losses were seen" if not unchanged.losses else "two unchanged runs differ"
        return LossCheck("not checked", True, f"losses not checked: {reason}")
    ours, theirs = changed.losses[:count], unchanged.losses[:count]
    if ours == theirs:
        return LossCheck("equal", True, f"first {count} losses equal")
    if _are_close(ours, theirs) and (required in (ANY, CLOSE) or repeated == CLOSE):
        return LossCheck("close", True, f"first {count} losses equal within {RELATIVE_TOLERANCE:g}")
    largest = max(abs(a - b) / max(abs(b), _ABSOLUTE_TOLERANCE) for a, b in zip(ours, theirs, strict=True))
    differ = f"losses differ, by up to {largest:.2g} of their value"
    if required == ANY:
        return LossCheck("differ", True, f"{differ}: this change may do that")
    if required == BATCHES and _are_same_batches(unchanged, changed):
        reason = (
            "the indices of the batches are equal, so the dataset itself varies, as with random augmentation"
        )
        return LossCheck("differ", True, f"{differ}: {reason}")
    return LossCheck("differ", False, differ)


def _are_close(ours: Sequence[float], theirs: Sequence[float]) -> bool:
    # Not a number is equal to itself here: both runs have diverged at the same step.
    return all(
        abs(a - b) <= max(RELATIVE_TOLERANCE * abs(b), _ABSOLUTE_TOLERANCE) or (a != a and b != b)
        for a, b in zip(ours, theirs, strict=True)
    )


def _are_same_batches(unchanged: Trial, changed: Trial) -> bool:
    count = min(len(unchanged.batches), len(changed.batches))
    return count >= MIN_LOSSES and unchanged.batches[:count] == changed.batches[:count]
