"""Verdicts that last: what one look alone has found is not told, what one has missed is not dropped."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from torchperfd_daemon.diagnosis import Cause, Verdict

LOOKS: Final = 3
"""A verdict is told once it has been found at so many looks in a row, and dropped when missed as often."""
DATED_LOOKS: Final = 2
"""The same of a verdict on a slowdown that has an onset: that it lasts is known already."""
_STICKS: Final = 1.25
"""Another verdict comes first only if it costs so many times what the present first does."""


@dataclass(slots=True)
class _Claim:
    verdict: Verdict
    found: int = 0
    missed: int = 0
    held: bool = False


class VerdictDebouncer:
    """The verdicts on one run, from look to look. Two are the same if cause and rank are."""

    def __init__(self) -> None:
        self._claims: dict[tuple[Cause, int | None], _Claim] = {}
        self.verdicts: tuple[Verdict, ...] = ()
        """Those that hold, the first one first; empty where nothing does."""

    @property
    def first(self) -> Verdict | None:
        """The verdict; None where nothing holds."""
        return self.verdicts[0] if self.verdicts else None

    def update(self, found: Sequence[Verdict]) -> bool:
        """Take what a look has found; return whether the first verdict is another one now."""
        for claim in self._claims.values():
            claim.missed += 1
        for verdict in found:
            claim = self._claims.setdefault((verdict.cause, verdict.rank), _Claim(verdict))
            claim.verdict = verdict
            claim.found = claim.found + 1 if claim.missed == 1 or not claim.found else 1
            claim.missed = 0
            claim.held = claim.held or claim.found >= (LOOKS if verdict.onset_step is None else DATED_LOOKS)
        self._claims = {
            key: claim for key, claim in self._claims.items() if claim.missed < (LOOKS if claim.held else 1)
        }
        before = self.first
        held = [claim.verdict for claim in self._claims.values() if claim.held]
        troubles = [verdict for verdict in held if verdict.cause is not Cause.NONE]
        self.verdicts = tuple(sorted(troubles or held, key=lambda each: -self._weight(each, before)))
        first = self.first
        if first is None or before is None:
            return first is not before
        return not _same(first, before)

    def _weight(self, verdict: Verdict, first: Verdict | None) -> float:
        sticks = first is not None and _same(verdict, first)
        return verdict.cost_seconds_per_step * (_STICKS if sticks else 1.0)


def _same(one: Verdict, other: Verdict) -> bool:
    return (one.cause, one.rank) == (other.cause, other.rank)
