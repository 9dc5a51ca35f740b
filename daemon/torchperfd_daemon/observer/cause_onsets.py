"""Since when each cause takes time: one that joins a slowdown later has an onset of its own."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from torchperfd_daemon.diagnosis import Cause, Verdict
from torchperfd_daemon.diagnosis.windows import MIN_FINDINGS, SAMPLE_S, WINDOW_SAMPLES
from torchperfd_daemon.observer.slowdown import Slowdown
from torchperfd_daemon.store import Rank

# Until a window is full of slow steps, a small cause of the same slowdown may not be found.
_WITH_SLOWDOWN_S: Final = (WINDOW_SAMPLES + MIN_FINDINGS) * SAMPLE_S


class CauseOnsets:
    """Keeps the onset of each cause that has come with or during a slowdown."""

    def __init__(self) -> None:
        self._slowdown_step: int | None = None
        # By cause and rank: the first slower step, and when it ended in Unix seconds.
        self._onsets: dict[tuple[Cause, int | None], tuple[int, float]] = {}

    def date(
        self, verdicts: Sequence[Verdict], slowdown: Slowdown, ranks: Sequence[Rank], now: float
    ) -> list[Verdict]:
        """Return the verdicts of one sample, each that has grown with its onset.

        A cause that is found soon after the slowdown has the slowdown's onset; that of a later one is the
        newest step at its first sample.

        Args:
            ranks: The run's connected ranks.
            now: Monotonic seconds.
        """
        if slowdown.step != self._slowdown_step:
            self._slowdown_step = slowdown.step
            self._onsets.clear()
        with_slowdown = now - slowdown.detected_at <= _WITH_SLOWDOWN_S
        newest = max(ranks, key=lambda rank: rank.totals.train.steps, default=None)
        if with_slowdown or newest is None:
            onset = slowdown.step, slowdown.unix_seconds
        else:
            onset = newest.totals.train.steps, newest.last_step_unix_seconds
        return [
            _dated(verdict, *self._onsets.setdefault((verdict.cause, verdict.rank), onset))
            if verdict.has_grown
            else verdict
            for verdict in verdicts
        ]


def _dated(verdict: Verdict, step: int, unix_seconds: float) -> Verdict:
    return replace(
        verdict,
        evidence=f"{verdict.evidence}, since step {step}",
        onset_step=step,
        onset_unix_seconds=unix_seconds,
    )
