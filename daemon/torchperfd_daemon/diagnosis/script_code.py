"""The script's own code in a step: between the phases, or between a forward and its backward. Pure."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Final

LEAST_LOSS_SECONDS: Final = 0.003
"""A shorter ``loss`` is what it is called: a small model's loss may be a large part of a short step."""

WORDS: Final[Mapping[str, str]] = {
    "other": "the script's own code between the phases",
    "loss": "the script's own code between the forward and the backward",
}
"""By phase, what it is when it is script code."""


def script_code_phase(ranks: Sequence[tuple[Mapping[str, float], float]]) -> str:
    """Return the phase in which most ranks spend most of the script's own code: ``other`` or ``loss``.

    The time of ``loss`` counts from :data:`LEAST_LOSS_SECONDS` on.

    Args:
        ranks: Of each rank, the seconds of each phase, and of the step; at least one.
    """

    def share(phase: str, least: float) -> float:
        shares = [phases.get(phase, 0.0) / step for phases, step in ranks if phases.get(phase, 0.0) >= least]
        return statistics.median_low([0.0] * (len(ranks) - len(shares)) + shares)

    return "loss" if share("loss", LEAST_LOSS_SECONDS) > share("other", 0.0) else "other"
