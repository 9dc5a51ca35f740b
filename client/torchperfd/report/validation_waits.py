"""Validation's waits for data, which no verdict covers: verdicts are about training steps. Pure."""

from collections.abc import Iterator, Sequence
from typing import Final

from torchperfd.durations import duration
from torchperfd.report.numbers import fit_ns
from torchperfd.report.rank import RankReport
from torchperfd.steps.phases import DATA

_MIN_SHARE: Final = 0.2
"""From this share of the step on, a wait for data counts, as in the verdict."""
_LEAST_OF_FIT: Final = 0.05
"""Validation that takes a smaller share of the whole time does not count."""


def validation_waits(reports: Sequence[RankReport]) -> Iterator[str]:
    """Return in words how long the validation of the rank that waits longest waits for data."""
    # Beside a device the host may wait while the device still works, which costs nothing.
    reports = [each for each in reports if each.totals.cuda is None]
    longest = max(reports, key=lambda each: each.totals.validate.phases[DATA].ns, default=None)
    if longest is None:
        return
    validate, fit = longest.totals.validate, fit_ns(longest.totals)
    waits = validate.phases[DATA].ns
    if not fit or validate.ns < _LEAST_OF_FIT * fit or waits < _MIN_SHARE * validate.ns:
        return
    each_waits = duration(waits / validate.steps / 1e9)
    yield (
        f"validation waits for data: {each_waits} of each {duration(validate.mean_seconds)} step"
        f" ({waits / validate.ns:.0%}); validation is {validate.ns / fit:.0%} of the time"
    )
