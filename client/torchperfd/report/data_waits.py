"""Waits for data that no verdict covers: those of validation, and those that were always there. Pure."""

from collections.abc import Collection, Iterator, Sequence
from typing import Final

from torchperfd.durations import duration
from torchperfd.report.numbers import fit_ns, steady_steps
from torchperfd.report.rank import RankReport
from torchperfd.steps.phases import DATA
from torchperfd.steps.totals import KindTotals

_OF_DATA: Final = frozenset({"input-bound", "slow storage"})
_LEAST_SHARE: Final = 0.2
"""From this share of the step on, a wait for data counts, as in the verdict."""
_LEAST_OF_FIT: Final = 0.05
"""Validation that takes a smaller share of the whole time does not count."""


def data_waits(reports: Sequence[RankReport], causes: Collection[str]) -> Iterator[str]:
    """Return in words which waits for data the causes do not cover; of the rank that waits longest.

    A verdict is about the newest training steps; these are means of all steps, and of validation.

    Args:
        causes: The names of the causes found.
    """
    # Beside a device the host may wait while the device still works, which costs nothing.
    reports = [each for each in reports if each.totals.cuda is None]
    if not _OF_DATA & set(causes):
        train = max((steady_steps(each.totals) for each in reports), key=_share, default=KindTotals())
        if _share(train) >= _LEAST_SHARE:
            yield f"training waits for data: {_words(train)}; torchperfd explain input-bound"
    longest = max(reports, key=lambda each: each.totals.validate.phases[DATA].ns, default=None)
    if longest is None:
        return
    validate, fit = longest.totals.validate, fit_ns(longest.totals)
    if fit and validate.ns >= _LEAST_OF_FIT * fit and _share(validate) >= _LEAST_SHARE:
        part = f"validation is {validate.ns / fit:.0%} of the time"
        yield f"validation waits for data: {_words(validate)}; {part}"


def _share(kind: KindTotals) -> float:
    return kind.phases[DATA].ns / kind.ns if kind.ns else 0.0


def _words(kind: KindTotals) -> str:
    waits = kind.phases[DATA].ns / kind.steps / 1e9
    return f"{duration(waits)} of each {duration(kind.mean_seconds)} step ({_share(kind):.0%})"
