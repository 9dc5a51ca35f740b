"""Causes that last beside a slowdown: the script's own code between the phases, and the wait for data."""

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.daemon.rank_evidence import Containing, Expected, changed, rank, seen, since

from torchperfd_daemon.diagnosis.evidence import RankEvidence
from torchperfd_daemon.diagnosis.verdict import Cause
from torchperfd_daemon.diagnosis.verdicts import rank_causes


def loading(queued: float = 0.0, **phases: float) -> RankEvidence:
    """Return a rank that waits for data for 90 ms of its step."""
    return replace(changed(rank(0), **({"data": 0.09} | phases)), queued_seconds=queued)


def test_lasting_wait_for_data_stays_beside_a_slowdown() -> None:
    now = since(loading(), loading(queued=0.02, forward=0.05))
    first, second = rank_causes("r", [now])
    assert (first.cause, first.has_grown) == (Cause.INPUT_BOUND, False)
    assert (second.cause, second.has_grown) == (Cause.CPU_CONTENTION, True)
    assert first.cost_seconds_per_step == pytest.approx(0.09, rel=0.01)
    assert first.cost_seconds_per_step + second.cost_seconds_per_step <= now.step_seconds


def newcomer(**changes: Any) -> RankEvidence:
    """Return the only rank of a run on the CPU, whose own function takes 70 % of the step."""
    phases = {"data": 0.0006, "forward": 0.006, "backward": 0.007, "optimizer": 0.0012, "other": 0.0346}
    return replace(RankEvidence(0, "n", 0.0494, phases), **changes)


NEW = changed(newcomer(), other=0.001)
EXACT = "34.6 ms of each 49.4 ms step in the script's own code between the phases"
HINT = "in the script's own code between the phases, a cause from 20% on"


def grown(cause: Cause, cost: float, part: str = "") -> Expected:
    return Expected(cause, cost=cost, has_grown=True, evidence=Containing(part))


ALONE: dict[str, tuple[RankEvidence, Expected]] = {
    "a lasting wait for data that grows is one verdict": (
        since(loading(), loading(data=0.11)),
        grown(Cause.INPUT_BOUND, 0.11, "20 ms of it more than before"),
    ),
    "a wait for data that has ended is not lasting": (
        since(loading(), loading(data=0.001, optimizer=0.15)),
        Expected(Cause.UNKNOWN),
    ),
    # Steps that are quicker than their past again have no cause of a slowdown.
    "a lasting wait for data outlasts a recovery": (
        since(loading(forward=0.05), loading()),
        Expected(Cause.INPUT_BOUND, has_grown=False),
    ),
    "script code of a rank on the CPU is the cause": (
        newcomer(),
        Expected(Cause.SCRIPT_CODE, None, 0.0346, "other", evidence=EXACT),
    ),
    "a loss that is longer is the part that is named": (
        changed(newcomer(), loss=0.04, other=0.0),
        Expected(Cause.SCRIPT_CODE, phase="loss"),
    ),
    "a loss that is shorter is not named": (
        changed(newcomer(), loss=0.01, other=0.03),
        Expected(Cause.SCRIPT_CODE, phase="other"),
    ),
    "script code beside work on a device is no cause": (newcomer(on_device=True), Expected(Cause.NONE)),
    "script code beside a busy device is no cause": (newcomer(device_busy=0.9), Expected(Cause.NONE)),
    "script code that is hidden is no cause": (newcomer(hides_script_code=True), Expected(Cause.NONE)),
    "script code below its share is no cause": (
        changed(newcomer(), other=0.0016),
        Expected(Cause.NONE, evidence=Containing(HINT)),
    ),
    "script code that has grown is one verdict": (
        since(newcomer(), changed(newcomer(), other=0.06)),
        grown(Cause.SCRIPT_CODE, 0.06, "25.4 ms of it more than before"),
    ),
    "script code that is new costs its growth": (
        since(NEW, newcomer()),
        grown(Cause.SCRIPT_CODE, 0.0336),
    ),
    "script code that is new and short is unknown": (
        since(NEW, changed(NEW, other=0.0035)),
        Expected(Cause.UNKNOWN, phase="other"),
    ),
}


@pytest.mark.parametrize(("only", "expected"), ALONE.values(), ids=ALONE)
def test_rank_causes_of_an_only_rank(only: RankEvidence, expected: Expected) -> None:
    assert seen(rank_causes("r", [only])) == [expected]


def test_script_code_far_below_its_share_is_not_shown() -> None:
    (verdict,) = rank_causes("r", [changed(newcomer(), other=0.0005)])
    assert verdict.cause is Cause.NONE
    assert HINT not in verdict.evidence


def test_loss_that_lasts_outlasts_a_slowdown() -> None:
    past = changed(newcomer(), other=0.0, loss=0.04)
    slower = changed(past, forward=0.012)
    assert Cause.SCRIPT_CODE in {each.cause for each in rank_causes("r", [since(past, slower)])}


def test_script_code_of_one_rank_makes_it_a_slow_rank() -> None:
    phases = {"forward": 0.03, "backward": 0.06, "other": 0.002, "collective_wait": 0.06}
    quick = RankEvidence(0, "n", 0.152, phases)
    slow = replace(changed(quick, other=0.06, collective_wait=0.002), rank=1)
    slow = replace(slow, late_seconds=0.058, late_phase="other")
    (verdict,) = rank_causes("r", [quick, slow])
    assert (verdict.cause, verdict.rank, verdict.phase) == (Cause.SLOW_RANK, 1, "other")


def test_script_code_of_all_ranks_costs_what_they_share() -> None:
    phases = {"forward": 0.03, "backward": 0.03, "other": 0.05, "collective_wait": 0.03}
    quick = RankEvidence(0, "n", 0.14, phases)
    slow = replace(changed(quick, other=0.08, collective_wait=0.0), rank=1)
    slow = replace(slow, late_seconds=0.03, late_phase="other")
    first, second = rank_causes("r", [quick, slow])
    assert (first.cause, first.rank) == (Cause.SCRIPT_CODE, None)
    assert first.cost_seconds_per_step == pytest.approx(0.05)
    assert (second.cause, second.rank) == (Cause.SLOW_RANK, 1)
    assert second.cost_seconds_per_step == pytest.approx(0.03)


def test_script_code_costs_what_earlier_causes_leave() -> None:
    """A garbage collection in the same phase takes its part first, in proportion to all own work."""
    first, second = rank_causes("r", [newcomer(collected_seconds=0.01)])
    assert (first.cause, second.cause) == (Cause.SCRIPT_CODE, Cause.GARBAGE_COLLECTION)
    assert second.cost_seconds_per_step == pytest.approx(0.01)
    assert first.cost_seconds_per_step == pytest.approx(0.0346 * (1 - 0.01 / 0.0494), rel=1e-3)


def test_script_code_costs_its_wait_for_processors_too() -> None:
    """The phase has 70 % of the step, most of it without a processor: all of it comes back with the code."""
    (only,) = rank_causes("r", [newcomer(queued_seconds=0.8 * 0.0494)])
    assert only.cause is Cause.SCRIPT_CODE
    assert only.cost_seconds_per_step == pytest.approx(0.0346)
    assert only.note.startswith("busy node: everything takes 5.0 times as long")


def test_script_code_stays_beside_a_slowdown_without_a_cause() -> None:
    now = since(newcomer(), changed(newcomer(), forward=0.026))
    found = rank_causes("r", [now])
    assert {each.cause for each in found} == {Cause.UNKNOWN, Cause.SCRIPT_CODE}
    assert {each.cause: each.has_grown for each in found} == {Cause.UNKNOWN: True, Cause.SCRIPT_CODE: False}
    assert sum(each.cost_seconds_per_step for each in found) <= now.step_seconds


def test_script_code_and_data_both_outlast_a_slowdown() -> None:
    before = changed(newcomer(), data=0.03)
    found = rank_causes("r", [since(before, changed(before, backward=0.02))])
    assert {each.cause for each in found} == {Cause.UNKNOWN, Cause.INPUT_BOUND, Cause.SCRIPT_CODE}
