"""What-if on real ranks: what is predicted without a rank's lateness is what is measured without it."""

import os
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from tests.scenarios import whatif_ranks
from tests.scenarios.whatif_ranks import CULPRIT, LATE_S, STEPS, is_late
from tests.support.node import Node, torchrun

from torchperfd_daemon.diagnosis.detect.straggler import RankWork
from torchperfd_daemon.diagnosis.predictions import Removed, predict

pytestmark = [pytest.mark.slow, pytest.mark.serial]

_RANKS = 2
_WITHIN = 0.05


@pytest.fixture(scope="module")
def recorded() -> list[dict[str, Any]]:
    """The output of ``torchperfd steps`` for each rank, and of ``torchperfd whatif`` for both."""
    command = [
        *torchrun(_RANKS),
        whatif_ranks.__file__,
    ]
    node = Node()
    try:
        node.start_daemon()
        with node.running(*command, PYTHONPATH=os.environ.get("PYTHONPATH", "")) as process:
            _, errors = process.communicate(timeout=150)
        assert process.returncode == 0, errors
        steps = [node.json("steps", "--rank", str(rank), "--last", "256") for rank in range(_RANKS)]
        return [*steps, node.json("whatif")]
    finally:
        node.close()


def test_every_step_is_there_with_its_index(recorded: list[dict[str, Any]]) -> None:
    for reported in recorded[:_RANKS]:
        assert reported["first_step"] == 0
        assert len(reported["step_seconds"]) == STEPS
    late = recorded[CULPRIT]["phase_seconds"]["loss"]
    usual = fmean(seconds for step, seconds in enumerate(late) if not is_late(step))
    excess = fmean(seconds for step, seconds in enumerate(late) if is_late(step)) - usual
    assert excess == pytest.approx(LATE_S, rel=0.4)


def test_whatif_gain_of_removing_lateness_matches_measurement(recorded: list[dict[str, Any]]) -> None:
    # The first step connects the ranks.
    late = [step for step in range(1, STEPS) if is_late(step)]
    well = [step for step in range(1, STEPS) if not is_late(step)]
    reported = predict(
        [
            RankWork(rank, {name: np.array(column)[late] for name, column in each["phase_seconds"].items()})
            for rank, each in enumerate(recorded[:_RANKS])
        ]
    )
    seconds = recorded[CULPRIT]["step_seconds"]
    before, after = fmean(seconds[step] for step in late), fmean(seconds[step] for step in well)
    best = reported.answers[0]
    assert (best.removed, best.rank, best.phase) == (Removed.RANK_EXCESS, CULPRIT, "loss")
    assert best.gain_seconds == pytest.approx(before - after, abs=_WITHIN * before)
    assert best.step_seconds == pytest.approx(after, abs=_WITHIN * before)


def test_the_command_names_the_same_rank(recorded: list[dict[str, Any]]) -> None:
    [run] = recorded[-1]["runs"]
    assert (run["ranks"], run["world_size"], run["steps"], run["synchronous"]) == (
        _RANKS,
        _RANKS,
        STEPS - 1,  # without the first, which connects the ranks
        True,
    )
    excess = [answer for answer in run["answers"] if answer["removed"] == "rank excess"]
    assert (excess[0]["rank"], excess[0]["phase"]) == (CULPRIT, "loss")
    # It is late in half of the steps.
    assert excess[0]["gain_seconds"] == pytest.approx(LATE_S / 2, abs=_WITHIN * run["step_seconds"])
