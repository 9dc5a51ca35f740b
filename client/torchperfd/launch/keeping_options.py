"""Options of ``torchperfd run`` on what becomes of its report."""

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KeepingOptions:
    """What becomes of the report at the end of a run.

    Attributes:
        directory: Where it is kept; this user's default if empty.
        is_kept: Whether it is.
        baseline: A file, or the id of a kept run, to compare with; empty for none.
        fail_above: Largest share by which the step may be slower than the baseline's; None for any.
    """

    directory: str = ""
    is_kept: bool = True
    baseline: str = ""
    fail_above: float | None = None


def keeping_options(values: Mapping[str, str], flags: set[str]) -> KeepingOptions:
    """Return the options of a command line.

    Raises:
        ValueError: They are invalid or contradictory; the message has the reason.
    """
    baseline = values.get("--baseline", "")
    if "--fail-above" in values and not baseline:
        raise ValueError("--fail-above needs a --baseline")
    return KeepingOptions(
        directory=values.get("--runs-dir", ""),
        is_kept="--no-keep" not in flags,
        baseline=baseline,
        fail_above=_share(values["--fail-above"]) if "--fail-above" in values else None,
    )


def _share(text: str) -> float:
    number = text.strip()
    try:
        share = float(number.removesuffix("%")) / (100 if number.endswith("%") else 1)
    except ValueError:
        share = math.nan
    if not (math.isfinite(share) and share >= 0):
        raise ValueError(f"--fail-above {text} is no share such as 5% or 0.05")
    return share
