"""Fits the model to the oracle's jobs, of which single steps of devices and makers of batches are known."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from benchmarks.account.loaders import Batches

from torchperfd_daemon.diagnosis.step_model import StepModel, replay
from torchperfd_daemon.diagnosis.step_records import Fit, RankRecord, launch, launching

_DEPTHS: Final = (1, 2, 4, 8)
_IDLE_COUNTS: Final = 0.05
_LAUNCH_COUNTS: Final = 0.02


def fit_steps(records: Sequence[RankRecord], warm: int, batches: Batches | None) -> StepModel:
    """Return the model of which the replay gives the recorded steps.

    Args:
        records: Of the same steps of each rank; at least one.
        warm: The first steps, which count for nothing.
        batches: How workers make batches; None without workers.
    """
    found = _Candidates(records, warm)
    model = found.without_waits()
    if batches is not None:
        model = replace(model, make=batches.make, handover=batches.handover, workers=batches.workers)
    if not model.has_device:
        return model
    if found.is_synced:
        return min(found.with_syncs(model), key=lambda each: found.error(each) + _unlike(each))
    return min((replace(found.without_stalls(model), depth=depth) for depth in _DEPTHS), key=found.error)


class _Candidates(Fit):
    """Models with the places where hosts may wait for their devices, and how far each is off."""

    def __init__(self, records: Sequence[RankRecord], warm: int) -> None:
        super().__init__(records, warm)
        self._later = slice(warm, None)

    def error(self, model: StepModel) -> float:
        """Return by how much a replay differs from what was recorded, in seconds per step."""
        replayed = replay(model)
        pairs = (
            (1.0, replayed.steps, self.steps),
            (1.0, replayed.synced, self.sync),
            # Gaps within a phase are in its time where the device records them, and not in this one.
            (_IDLE_COUNTS, replayed.idle, self.idle),
        )
        return sum(
            weight * float(np.abs(now[:, self._later].mean(axis=1) - then[:, self._later].mean(axis=1)).max())
            for weight, now, then in pairs
        )

    def with_syncs(self, model: StepModel) -> Iterator[StepModel]:
        """Yield the model with the host's waits at the end, in one of the phases that launch, or in both."""
        yield self.synced_at_end(model, self.sync)
        for early in launching(model):
            beyond = model.host[early] - launch(early, model)
            for first, is_at_end in ((np.clip(beyond, 0.0, self.sync), True), (self.sync, False)):
                host, syncs = model.host.copy(), model.syncs.copy()
                host[early] -= first
                syncs[early] = True
                changed = replace(model, host=host, syncs=syncs)
                yield (
                    self.synced_at_end(changed, self.sync - first)
                    if is_at_end
                    else changed.with_host(changed.host)
                )


def _unlike(model: StepModel) -> float:
    """Return by how much launching takes longer in one phase than in others, for as much work.

    Of places for waits that explain as much, those with the least of it are chosen.
    """
    beyond = [model.host[each] - launch(each, model) for each in launching(model)]
    # All ranks run the same script: what one of them spends in a phase is no wait of all.
    return _LAUNCH_COUNTS * sum(float(np.median(np.abs(each.mean(axis=1)))) for each in beyond)
