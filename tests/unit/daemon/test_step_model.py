"""The model of a step: replays, edits and the account keep what must hold for any job."""

from dataclasses import replace
from typing import Final

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.values import some

from torchperfd.model.step_account import PartKind
from torchperfd_daemon.diagnosis.detect.straggler import RankWork
from torchperfd_daemon.diagnosis.edits import (
    as_peers,
    both,
    equal_work,
    less_exchange,
    less_host,
    own_work,
    without_peaks,
    without_syncs,
)
from torchperfd_daemon.diagnosis.evidence import RankEvidence
from torchperfd_daemon.diagnosis.job import Job
from torchperfd_daemon.diagnosis.step_model import ALONE, DEVICE, HOST, Float64, StepModel, replay
from torchperfd_daemon.diagnosis.step_records import RankRecord, fit
from torchperfd_daemon.diagnosis.verdict import Cause
from torchperfd_daemon.diagnosis.verdicts import rank_causes

STEPS: Final = 24
WARM: Final = 8
PHASES: Final = ("forward", "backward", "optimizer", "other")


def model(
    host: Float64,
    device: Float64 | None = None,
    barrier: str = HOST,
    *,
    syncs: bool = False,
    workers: int = 0,
    make: float = 0.0,
    exchange: float = 0.001,
) -> StepModel:
    """Return a model of two phases ahead of the collectives and two behind them.

    Args:
        host: Seconds of each phase and rank; shape (phases, ranks).
        device: The same on the device; None without one.
    """
    ranks = host.shape[1]
    ones = np.ones(STEPS)
    none = np.zeros_like(host)
    return StepModel(
        before=PHASES[:2],
        after=PHASES[2:],
        host=host[..., None] * ones,
        device=(none if device is None else device)[..., None] * ones,
        syncs=np.array([False, False, syncs, False]),
        make=np.full((ranks, STEPS), make),
        handover=np.zeros((ranks, STEPS)),
        workers=workers,
        exchange=np.full(STEPS, exchange if barrier != ALONE else 0.0),
        barrier=barrier,
        warm=WARM,
    )


def alike(ranks: int, *seconds: float) -> Float64:
    """Return these phases for each of some ranks; shape (phases, ranks)."""
    return np.repeat(np.array(seconds)[:, None], ranks, axis=1)


def test_replay_on_the_host_waits_for_the_last_rank() -> None:
    host = alike(4, 0.01, 0.02, 0.002, 0.0)
    host[0, 2] += 0.005
    replayed = replay(model(host))
    assert replayed.mean == pytest.approx(0.038)
    assert replayed.waits[0, WARM] == pytest.approx(0.006)
    assert replayed.waits[2, WARM] == pytest.approx(0.001)


def test_replay_hides_the_loader_behind_the_device() -> None:
    work = alike(1, 0.03, 0.06, 0.005, 0.0)
    quick = model(alike(1, 0.003, 0.005, 0.001, 0.001), work, ALONE)
    slow = replace(quick, make=quick.make + 0.04)
    assert replay(quick).mean == pytest.approx(0.095)
    assert replay(slow).mean == pytest.approx(0.095)
    read = replace(slow, syncs=np.array([False, False, True, False]))
    assert replay(read).mean == pytest.approx(0.095 + 0.04 + 0.001, abs=0.002)
    assert replay(without_syncs(read)).mean == pytest.approx(0.095)


def test_replay_of_workers_takes_their_rate() -> None:
    loader = model(alike(1, 0.01, 0.01, 0.0, 0.0), None, ALONE, workers=2, make=0.06)
    assert replay(loader).mean == pytest.approx(0.03)
    assert replay(replace(loader, workers=4)).mean == pytest.approx(0.02, rel=0.05)


def test_replay_on_devices_waits_for_the_slow_stream() -> None:
    work = alike(4, 0.03, 0.06, 0.005, 0.0)
    work[1, 1] *= 1.5
    replayed = replay(model(alike(4, 0.003, 0.005, 0.001, 0.001), work, DEVICE))
    assert replayed.mean == pytest.approx(0.095 + 0.03 + 0.001, rel=0.01)
    assert replayed.waits[0, -1] > 0.029


def test_pause_on_each_rank_at_another_step_delays_all() -> None:
    jobs = model(alike(4, 0.01, 0.0, 0.0, 0.0))
    host = jobs.host.copy()
    for rank in range(4):
        host[0, rank, rank::4] += 0.02
    paused = jobs.with_host(host)
    assert replay(paused).mean == pytest.approx(0.031)
    taken = less_host(dict.fromkeys(range(4), 0.005), peaks=True)
    assert replay(taken(paused)).mean == pytest.approx(0.011)


@given(
    st.integers(2, 6),
    st.integers(0, 2**32 - 1),
    st.floats(0.0, 0.05),
    st.floats(0.0, 0.05),
    st.floats(0.0, 0.02),
)
@settings(max_examples=60, deadline=None)
def test_job_without_all_its_losses_is_the_ideal_one(
    ranks: int, seed: int, late: float, paused: float, exchange: float
) -> None:
    """A late rank, pauses, uneven work and the exchange: without them each step is the mean of the work."""
    chance = np.random.default_rng(seed)
    jobs = model(alike(ranks, 0.01, 0.02, 0.002, 0.0), exchange=exchange)
    host = jobs.host * chance.lognormal(0, 0.3, jobs.host.shape)
    useful = host.copy()
    host[0, 0] += late
    host[3, -1, ::4] += 4 * paused
    lossy = jobs.with_host(host)
    without = both(
        less_host({0: late}, "forward"),
        less_host({ranks - 1: paused}, "other", peaks=True),
        equal_work([range(ranks)], means=True),
        less_exchange(exchange),
    )
    ideal = float(useful.sum(axis=0)[:, WARM:].mean())
    assert replay(without(lossy)).mean == pytest.approx(ideal, rel=0.1)
    assert replay(without(lossy)).mean <= replay(lossy).mean + 1e-12


def test_equal_work_gives_back_what_differs_from_step_to_step() -> None:
    jobs = model(alike(4, 0.01, 0.0, 0.0, 0.0))
    host = jobs.host.copy()
    for step in range(STEPS):
        host[0, step % 4, step] += 0.04
    uneven = jobs.with_host(host)
    assert replay(uneven).mean == pytest.approx(0.051)
    assert replay(equal_work([range(4)])(uneven)).mean == pytest.approx(0.021)
    assert replay(as_peers({0: [1, 2, 3]})(uneven)).mean == pytest.approx(0.051)


times = st.floats(1e-4, 1.0)


@st.composite
def models(draw: st.DrawFn) -> StepModel:
    """Return any job on the host or on devices."""
    ranks = draw(st.integers(1, 4))
    seed = draw(st.integers(0, 2**32 - 1))
    chance = np.random.default_rng(seed)
    barrier = ALONE if ranks == 1 else draw(st.sampled_from([HOST, DEVICE]))
    on_device = barrier == DEVICE or draw(st.booleans())
    noise = 1 + draw(st.sampled_from([0.0, 0.05, 0.4])) * chance.random((4, ranks, STEPS))
    host = np.array(draw(st.lists(times, min_size=4, max_size=4)))[:, None, None] * noise
    work = np.array([draw(times), draw(times), draw(times), 0.0])[:, None, None] * noise
    base = model(alike(ranks, 1.0, 1.0, 1.0, 1.0), None, barrier, syncs=on_device and draw(st.booleans()))
    return replace(
        base,
        host=host,
        device=work if on_device else np.zeros_like(work),
        make=draw(times) * noise[0],
        workers=draw(st.sampled_from([0, 0, 2])),
        exchange=base.exchange * draw(times) * 1e3,
        # From the very first step on, so that no queue at the start of a window differs.
        warm=0,
    )


@settings(deadline=None)
@given(models(), st.floats(0.0, 1.0))
def test_less_work_never_makes_steps_longer(job: StepModel, share: float) -> None:
    before = replay(job).mean
    for rank in range(job.make.shape[0]):
        seconds = share * float(own_work(job)[rank].mean())
        for peaks in (False, True):
            assert replay(less_host({rank: seconds}, peaks=peaks)(job)).mean <= before * (1 + 1e-9)
    assert replay(less_exchange(share * float(job.exchange.mean()))(job)).mean <= before * (1 + 1e-9)
    assert replay(without_syncs(job)).mean <= before * (1 + 1e-9)


@settings(deadline=None)
@given(models(), st.floats(0.1, 10.0))
def test_steps_scale_with_all_times(job: StepModel, scale: float) -> None:
    longer = replace(
        job,
        host=scale * job.host,
        device=scale * job.device,
        make=scale * job.make,
        exchange=scale * job.exchange,
    )
    assert replay(longer).mean == pytest.approx(scale * replay(job).mean)
    assert replay(less_host({})(job)).mean == pytest.approx(replay(job).mean)


@settings(deadline=None)
@given(models())
def test_ranks_may_be_renumbered(job: StepModel) -> None:
    order = [*range(job.make.shape[0])][::-1]
    turned = replace(job, host=job.host[:, order], device=job.device[:, order], make=job.make[order])
    assert replay(turned).mean == pytest.approx(replay(job).mean)


@given(st.lists(st.floats(0, 10), min_size=1, max_size=40), st.floats(0, 10))
def test_without_peaks_takes_the_mean_from_the_longest(steps: list[float], less: float) -> None:
    own = np.array(steps)
    left = without_peaks(own, less)
    assert float(left.mean()) == pytest.approx(max(0.0, float(own.mean()) - less), abs=1e-9)
    assert (left <= own + 1e-12).all()
    assert (left >= 0).all()


def recorded(ranks: int, seed: int, uneven: float, late: float) -> list[RankRecord]:
    """Return what ranks record whose work differs from step to step, the last one's by more on average."""
    chance = np.random.default_rng(seed)
    own = 0.05 + uneven * chance.random((ranks, 128))
    own[-1] += late
    together = own.max(axis=0) + 0.004
    return [
        RankRecord(rank, {"forward": own[rank], "collective_wait": together - own[rank]})
        for rank in range(ranks)
    ]


@pytest.mark.parametrize(("uneven", "late"), [(0.0, 0.0), (0.05, 0.0), (0.0, 0.03), (0.05, 0.03)])
def test_fitted_model_replays_the_recorded_steps(uneven: float, late: float) -> None:
    records = recorded(4, 7, uneven, late)
    fitted = fit(records)
    assert fitted.barrier == HOST
    assert replay(fitted).mean == pytest.approx(float(records[0].steps.mean()))


@settings(deadline=None, max_examples=40)
@given(
    st.integers(2, 6),
    st.integers(0, 1000),
    st.sampled_from([0.0, 0.02, 0.1]),
    st.sampled_from([0.0, 0.04]),
)
def test_account_of_any_ranks_sums_to_their_step(ranks: int, seed: int, uneven: float, late: float) -> None:
    records = recorded(ranks, seed, uneven, late)
    evidence = [
        RankEvidence(
            each.rank,
            "n",
            float(each.steps.mean()),
            {name: float(column.mean()) for name, column in each.host.items()},
            late_seconds=late if each.rank == ranks - 1 else 0.0,
            late_phase="forward" if late else "",
        )
        for each in records
    ]
    works = {each.rank: RankWork(each.rank, dict(each.host)) for each in records}
    found = rank_causes("r", evidence, works=works)
    account = some(found[0].account)
    assert sum(part.seconds for part in account.parts) == pytest.approx(account.step_seconds, rel=1e-3)
    assert account.error < 0.001
    assert all(part.seconds >= 0 for part in account.parts)
    causes = {each.cause for each in found}
    assert Cause.UNEVEN_WORK not in causes or uneven
    assert Cause.UNEVEN_WORK in causes or account.share(PartKind.UNEVEN_WORK) < 0.1
    assert (Cause.SLOW_RANK in causes) == bool(late)


def test_job_of_devices_replays_their_mean_step() -> None:
    phases = {"data": 0.002, "forward": 0.01, "backward": 0.02, "optimizer": 0.002, "other": 0.066}
    device = {"forward": 0.03, "backward": 0.05, "optimizer": 0.01, "collective_wait": 0.008}
    rank = RankEvidence(
        0, "n", 0.1, phases, device, on_device=True, device_busy=0.9, sync_seconds=0.064, late_seconds=0.0
    )
    job = Job.of([rank, replace(rank, rank=1)])
    assert job.model.barrier == DEVICE
    assert not job.has_steps
    assert job.replayed.mean == pytest.approx(0.1, rel=0.02)
