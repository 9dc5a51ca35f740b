"""Waits that only devices see: late ranks, comparisons, and gains without them."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from tests.support.values import some
from tests.unit.daemon.watched_job import RUN, Watched, collecting

from torchperfd.document.blocks import Document
from torchperfd.document.terminal import render
from torchperfd.v1 import control_pb2, fleet_pb2
from torchperfd_cli.commands import ranks, steps, whatif
from torchperfd_daemon.diagnosis.detect.straggler import RankWork
from torchperfd_daemon.diagnosis.evidence import compare
from torchperfd_daemon.diagnosis.predictions import Predictions, Removed, WhatIf
from torchperfd_daemon.diagnosis.verdict import Cause, Verdict
from torchperfd_daemon.fleet import translate as fleet_translate
from torchperfd_daemon.fleet.translate import judge_all
from torchperfd_daemon.fleet.transport import PeerError
from torchperfd_daemon.service import node_survey
from torchperfd_daemon.store.store import Rank
from torchperfd_daemon.views import live as _view

SLOW = 3
LATE_S = 0.02
WAIT = "collective_wait"
DeviceWork = Callable[[Rank], RankWork | None]


def trained(late_s: float = LATE_S) -> Watched:
    """Return 16 ranks on two nodes, of which one may be late in the backward."""
    watched = Watched(16, on_device=True)
    watched.train(30, lambda rank, _step: {"backward": late_s} if rank == SLOW else {})
    return watched


def without_waits(watched: Watched) -> DeviceWork:
    """Return device times as of ranks whose wait no mark shows: it is part of the backward."""

    def device_work(rank: Rank) -> RankWork | None:
        work = watched.observer.device_work(rank)
        if work is None:
            return None
        phases = dict(work.phase_seconds)
        phases["backward"] = phases["backward"] + phases[WAIT]
        phases[WAIT] = np.zeros_like(phases[WAIT])
        return RankWork(work.rank, phases)

    return device_work


def steps_of(watched: Watched, device_work: DeviceWork) -> list[control_pb2.RankSteps]:
    request, lately = control_pb2.GetStepsRequest(), watched.observer.collections
    return list(node_survey.newest_steps(watched.store, request, device_work, lately).ranks)


def surveys_of(watched: Watched, device_work: DeviceWork) -> list[fleet_pb2.NodeSurvey]:
    """Return what each node's daemon reports of its own ranks."""
    request = fleet_pb2.NodeSurveyRequest(verdicts=True)
    whole = node_survey.survey(watched.store, watched.observer.verdict, device_work, request)
    quiet = control_pb2.Verdict(cause="none", run=RUN, rank=-1)
    return [
        fleet_pb2.NodeSurvey(
            node=node,
            ranks=[each for each in whole.ranks if each.status.identity.node == node],
            verdicts=[quiet],
        )
        for node in ("node-0", "node-1")
    ]


def test_ranks_shows_the_late_rank_and_its_times_on_the_device() -> None:
    watched = trained()
    [view] = _view.runs(steps_of(watched, watched.observer.device_work))
    assert (view.on_device, view.hidden) == (True, False)
    assert [each.rank for each in view.ranks if each.slow] == [SLOW]
    slow = some(view.ranks[SLOW].slow)
    assert slow.phase == "backward"
    assert slow.excess_seconds == pytest.approx(LATE_S, rel=0.1)
    assert view.ranks[0].phase_seconds[WAIT] == pytest.approx(LATE_S, rel=0.5)
    lines = render(ranks.ranks_document(view)).splitlines()
    assert lines[0].endswith("milliseconds per step on the devices")
    assert lines[-1].startswith(f"rank {SLOW} is slow: ")
    document = _view.run_dict(view)
    assert (document["timed_on"], document["waits_measured"]) == ("device", True)


def test_times_on_the_device_sum_to_the_step_after_a_change() -> None:
    watched = Watched(16, on_device=True)
    watched.train(30)
    watched.train(12, lambda _rank, _step: {"backward": 0.1})
    [view] = _view.runs(steps_of(watched, watched.observer.device_work))
    assert view.on_device
    for rank in view.ranks:
        assert sum(rank.phase_seconds.values()) == pytest.approx(rank.step_seconds, rel=1e-6)
        assert rank.step_seconds == pytest.approx(view.ranks[0].step_seconds, rel=0.05)


def test_healthy_ranks_whose_devices_wait_are_not_slow() -> None:
    watched = trained(late_s=0.0)
    [view] = _view.runs(steps_of(watched, watched.observer.device_work))
    assert (view.on_device, [each for each in view.ranks if each.slow]) == (True, [])


def test_single_steps_are_those_of_the_host() -> None:
    watched = trained()
    [message] = [
        each for each in steps_of(watched, watched.observer.device_work) if each.status.identity.rank == SLOW
    ]
    assert message.device_phases
    head, *lines = render(Document([[steps.steps_table(message, watched.job.wall)]])).splitlines()
    assert head.split()[-1] == "REST", "the shortest phases: the host only launches collectives"
    assert max(float(line.split()[-1]) for line in lines) < 1, "milliseconds"


def test_whatif_predicts_the_gain_without_the_late_rank() -> None:
    watched = trained()
    predictions = some(whatif.replay_newest(steps_of(watched, watched.observer.device_work), 0))
    assert predictions.on_device
    first = predictions.answers[0]
    assert (first.removed, first.rank, first.phase) == (Removed.RANK_EXCESS, SLOW, "backward")
    # What is left is the latest of the others by chance.
    assert first.gain_seconds == pytest.approx(LATE_S, rel=0.25)
    assert "means of a second on the devices replayed" in render(whatif.run_document(RUN, 16, predictions))


def test_whatif_removes_what_has_grown_on_all_devices() -> None:
    """The past of the devices is not kept; steps are as long on the host, where it is."""
    watched = Watched(16, on_device=True)
    watched.train(20)
    began = watched.job.step
    watched.train(15, lambda _rank, _step: {"backward": LATE_S})
    steps = steps_of(watched, watched.observer.device_work)
    predictions = some(whatif.replay_newest(steps, began))
    assert predictions.on_device
    first = predictions.answers[0]
    assert (first.removed, first.is_part) == (Removed.GROWTH, False)
    assert first.gain_seconds == pytest.approx(LATE_S, rel=0.1)
    assert first.step_seconds == pytest.approx(predictions.step_seconds - first.gain_seconds)
    without_a_past = some(whatif.replay_newest(steps, 0))
    assert not [each for each in without_a_past.answers if each.removed is Removed.GROWTH]


def test_the_fleet_names_a_rank_that_no_node_has_found() -> None:
    watched = trained()
    [verdict] = judge_all(surveys_of(watched, watched.observer.device_work))
    assert (verdict.cause, verdict.rank, verdict.node) == (Cause.SLOW_RANK, SLOW, "node-0")
    assert verdict.cost_seconds_per_step == pytest.approx(LATE_S, rel=0.1)


def test_waits_that_no_mark_shows_are_said_to_be_unknown() -> None:
    watched = trained()
    hiding = without_waits(watched)
    [view] = _view.runs(steps_of(watched, hiding))
    assert (view.on_device, view.hidden) == (False, True)
    assert not any(each.slow or each.behind_seconds for each in view.ranks)
    assert (
        render(ranks.ranks_document(view)).splitlines()[-1].startswith("cannot determine which rank is slow")
    )
    assert _view.run_dict(view)["waits_measured"] is False
    predictions = some(whatif.replay_newest(steps_of(watched, hiding), 0))
    assert not predictions.synchronous
    assert not [each for each in predictions.answers if each.rank is not None]
    [verdict] = judge_all(surveys_of(watched, hiding))
    assert verdict.cause is Cause.UNKNOWN
    assert verdict.evidence.startswith("cannot determine which rank is slow")
    assert verdict.next_command == f"torchperfd capture --run {RUN} --fleet --steps 5"


def test_ranks_without_device_times_are_compared_as_ever() -> None:
    watched = Watched(16)
    watched.train(30, lambda rank, _step: {"backward": LATE_S} if rank == SLOW else {})
    steps = steps_of(watched, watched.observer.device_work)
    assert not any(each.device_phases for each in steps)
    [view] = _view.runs(steps)
    assert (view.on_device, view.hidden) == (False, False)
    assert [each.rank for each in view.ranks if each.slow] == [SLOW]


def work(rank: int, own: float, wait: float) -> RankWork:
    return RankWork(rank, {"forward": np.full(12, own), WAIT: np.full(12, wait)})


def test_one_rank_without_device_times_is_enough_for_the_host() -> None:
    host = [work(0, 0.1, 0.0001), work(1, 0.1, 0.0001)]
    times = compare(host, [work(0, 0.08, 0.02), None])
    assert (times.works, times.on_device, times.hidden) == (host, False, False)


def test_ranks_on_devices_that_show_no_wait_may_hide_it() -> None:
    silent = [work(0, 0.1, 0.0), work(1, 0.2, 0.0)]
    assert compare(silent, [*silent]).hidden
    assert not compare(silent, [None, None]).hidden, "on the host they would be seen"
    assert not compare(silent[:1], silent[:1]).hidden, "a rank by itself waits for none"


def test_a_run_without_ranks_is_compared_as_nothing() -> None:
    times = compare([], [])
    assert (times.works, times.on_device, times.hidden) == ([], False, False)


@pytest.mark.parametrize("columns", [[8, 16], [7], [8 * 4000]])
def test_another_nodes_uneven_device_times_are_refused(columns: list[int]) -> None:
    steps = control_pb2.RankSteps()
    for number, size in enumerate(columns):
        steps.device_phases.add(phase=f"p{number}", ns=bytes(size))
    with pytest.raises(PeerError):
        fleet_translate.tidy_survey(fleet_pb2.NodeSurvey(ranks=[steps]))


SHORT_S, LONG_S, EVERY = 0.0002, 0.05, 20


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("earlier", ["many short ones", "none"])
def test_collections_that_became_long_gain_what_they_cost(seed: int, earlier: str) -> None:
    """The mean of a whole run's collections is that of thousands of short ones."""
    watched = Watched(4, seed=seed)
    watched.train(60, lambda _rank, _step: {"gc": SHORT_S} if earlier != "none" else {})
    watched.train(40, collecting(LONG_S, every=EVERY, apart=EVERY // 4))
    since = watched.verdict.onset_step or 0
    predictions = some(whatif.replay_newest(steps_of(watched, watched.observer.device_work), since))
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
    verdict = Verdict(cause, "r", "", None, phase, "words", 0.03, "", step_seconds=0.1)
    pause, exchange = predictions.as_judged([verdict]).answers
    assert (pause.removed, pause.phase, exchange) == (removed, phase, by_means[0])
    assert pause.gain_seconds == pytest.approx(0.03)
    assert pause.step_seconds == pytest.approx(0.07)
    assert predictions.as_judged([replace(verdict, cause=Cause.SLOW_RANK)]) == predictions


def test_predictions_on_devices_are_for_the_verdicts_step() -> None:
    """A second with a long step has fewer steps, and its mean counts as much as that of any other second."""
    exchange = WhatIf(Removed.EXCHANGE, None, "collective_wait", 0.06, 0.02)
    predictions = Predictions(2, 20, True, 0.08, 0.08, (exchange,), on_device=True)
    verdict = Verdict(Cause.CHECKPOINT, "r", "", None, "checkpoint", "words", 0.04, "", step_seconds=0.1)
    other = replace(verdict, cost_seconds_per_step=0.03, step_seconds=0.3)
    judged = predictions.as_judged([verdict])
    assert judged.step_seconds == judged.replayed_seconds == pytest.approx(0.1)
    assert [each.step_seconds for each in judged.answers] == pytest.approx([0.06, 0.075])
    assert [each.gain_seconds for each in judged.answers] == pytest.approx([0.04, 0.025])
    first = replace(verdict, cause=Cause.SLOW_RANK)
    assert [each.gain_seconds for each in predictions.as_judged([first, other]).answers] == pytest.approx(
        [0.025, 0.01]
    )
    assert predictions.as_judged([]) == predictions
