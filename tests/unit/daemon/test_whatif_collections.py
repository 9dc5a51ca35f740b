"""What a run gains without garbage collections that have changed: the present ones count."""

from dataclasses import replace

import pytest
from tests.unit.daemon.test_device_waits import steps_of
from tests.unit.daemon.test_observer import Watched, collecting

from torchperfd_cli.commands import whatif
from torchperfd_daemon.diagnosis import Cause, Verdict
from torchperfd_daemon.diagnosis.predictions import Predictions, Removed, WhatIf

SHORT_S, LONG_S, EVERY = 0.0002, 0.05, 20


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("earlier", ["many short ones", "none"])
def test_collections_that_became_long_gain_what_they_cost(seed: int, earlier: str) -> None:
    """The mean of a whole run's collections is that of thousands of short ones."""
    watched = Watched(4, seed=seed)
    watched.train(60, lambda _rank, _step: {"gc": SHORT_S} if earlier != "none" else {})
    watched.train(40, collecting(LONG_S, every=EVERY, apart=EVERY // 4))
    since = watched.verdict.onset_step or 0
    predictions = whatif.replay_newest(steps_of(watched, watched.observer.device_work), since)
    assert predictions is not None
    gains = {each.removed: each.gain_seconds for each in predictions.answers}
    # One of four ranks collects in every fifth step, and the others wait for it.
    assert gains[Removed.GARBAGE_COLLECTION] == pytest.approx(4 * LONG_S / EVERY, rel=0.15)


@pytest.mark.parametrize(
    ("cause", "removed", "phase"),
    [
        (Cause.CHECKPOINT, Removed.PHASE, "checkpoint"),
        (Cause.GARBAGE_COLLECTION, Removed.GARBAGE_COLLECTION, ""),
    ],
)
def test_pauses_on_devices_gain_what_the_verdict_says(cause: Cause, removed: Removed, phase: str) -> None:
    """Means of steps do not show pauses that a few of the steps have."""
    by_means = (
        WhatIf(Removed.EXCHANGE, None, "collective_wait", 0.09, 0.01),
        WhatIf(removed, None, phase, 0.095, 0.005),
    )
    predictions = Predictions(2, 20, True, 0.1, 0.1, by_means, on_device=True)
    verdict = Verdict(cause, "r", "", None, phase, "words", 0.06, "", step_seconds=0.2)
    pause, exchange = predictions.with_pauses_of([verdict]).answers
    assert (pause.removed, pause.phase, exchange) == (removed, phase, by_means[0])
    assert pause.gain_seconds == pytest.approx(0.03)
    assert pause.step_seconds == pytest.approx(0.07)
    assert predictions.with_pauses_of([replace(verdict, cause=Cause.SLOW_RANK)]) == predictions
