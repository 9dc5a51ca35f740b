"""`serve --demo`: its ranks, and commands that need a real process."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from itertools import pairwise

import pytest
from tests.support.values import some

from torchperfd.model.step_account import PartKind
from torchperfd_daemon.collectors.gpu_readings import NewestGpuReadings
from torchperfd_daemon.diagnosis.verdict import Cause
from torchperfd_daemon.errors import NoSuchTargetError
from torchperfd_daemon.observer.mean_step import verdict_on_mean_step
from torchperfd_daemon.observer.observer import Observer
from torchperfd_daemon.rpc.callers import Caller
from torchperfd_daemon.service.permissions import Rights
from torchperfd_daemon.service.stack_requests import choose
from torchperfd_daemon.service.targets import Targets
from torchperfd_daemon.simulated import SimulatedGpuCollector, SimulatedOwners, SimulatedRanks
from torchperfd_daemon.stacks.model import RankStacks
from torchperfd_daemon.store.model import RankIdentity, State
from torchperfd_daemon.store.store import Rank, Store


async def no_stacks(_ranks: Iterable[Rank], _seconds: float) -> AsyncIterator[RankStacks]:
    return
    yield


class Demo:
    """A demo at a time of the test's choosing."""

    def __init__(self, *, gpus: bool = True) -> None:
        self.now = 1_700_000_000.0
        self.store = Store(clock=lambda: self.now)
        self.watch = NewestGpuReadings(SimulatedGpuCollector(clock=lambda: self.now))
        if gpus:
            self.watch.sample()
        self.owners = SimulatedOwners(self.watch.newest)
        self.ranks = SimulatedRanks(self.store, self.watch.newest, "node-a", wall=lambda: self.now)
        self.observer = Observer(
            self.store,
            no_stacks,
            gpus=self.watch.newest,
            gpu_of=lambda identity: self.owners.of(identity).gpu_uuid,
            clock=lambda: self.now,
            wall=lambda: self.now,
        )

    def go(self, seconds: float) -> list[Rank]:
        """Let seconds pass, one by one; return the ranks."""
        until = self.now + seconds
        while self.now < until:
            self.now += 1
            self.watch.sample()
            self.ranks.advance()
            self.observer.sample()
        return list(self.store.ranks())

    def cause(self) -> str:
        """Return the present verdict."""
        return verdict_on_mean_step("demo", [*self.store.ranks()]).cause.value


def test_eight_ranks_step_together_in_the_time_there_is() -> None:
    ranks = Demo().go(60)
    assert [rank.identity.rank for rank in ranks] == list(range(8))
    steps = {rank.totals.train.steps for rank in ranks}
    assert len(steps) == 1
    [count] = steps
    assert 100 < count < 200
    for rank in ranks:
        train = rank.totals.train
        assert train.ns == sum(phase.ns for phase in train.phases.values())
        assert 59 < train.ns / 1e9 <= 60
        assert 1_700_000_059 < rank.last_step_unix_seconds <= 1_700_000_060
        assert rank.state is State.TRAINING


def test_totals_and_batches_agree() -> None:
    demo = Demo()
    [rank, *_] = demo.go(200)
    assert rank.totals.train.steps == sum(demo.store.histograms["demo"].counts) / 8
    assert rank.totals.train.ns / 1e9 * 8 - demo.store.histograms["demo"].sum_seconds < 1e-3 * 8
    assert demo.store.ingested_steps == 8 * rank.totals.train.steps


def test_counters_only_grow() -> None:
    demo = Demo()
    looks = [demo.go(37)[3].totals for _ in range(12)]
    for before, after in pairwise(looks):
        assert after.train.steps > before.train.steps
        assert after.validate.ns >= before.validate.ns
        assert some(after.checkpoint).ns >= some(before.checkpoint).ns
        assert all(after.train.phases[name].ns >= phase.ns for name, phase in before.train.phases.items())
    assert looks[-1].validate.steps > 0
    assert some(looks[-1].checkpoint).calls > 0


def test_a_rank_on_a_hot_gpu_holds_up_the_others() -> None:
    demo = Demo()
    demo.go(119)
    cool, hot = demo.store, {rank.identity.rank: rank.history for rank in demo.store.ranks()}
    waits = {number: history.mean_phase_seconds()["collective_wait"] for number, history in hot.items()}
    assert min(waits, key=lambda number: waits[number]) == 5
    assert waits[5] < min(wait for number, wait in waits.items() if number != 5) * 0.7
    assert len({round(rank.history.mean_step_seconds(), 9) for rank in cool.ranks()}) == 1


def test_the_verdict_changes_when_the_loaders_starve() -> None:
    demo = Demo()
    seen = set()
    ready = set()
    for _ in range(40):
        demo.go(10)
        seen.add(demo.cause())
        ready |= {rank.totals.loader_ready for rank in demo.store.ranks()}
    assert "input-bound" in seen
    assert len(seen) > 1
    assert ready == {0, 4}


def test_live_verdicts_are_on_what_the_demo_does() -> None:
    demo = Demo()
    seen = []
    for seconds in (25, 35, 55, 60):
        demo.go(seconds)
        verdict = some(demo.observer.verdict("demo"))
        seen.append((verdict.cause, verdict.rank))
    assert seen == [
        (Cause.NONE, None),
        (Cause.INPUT_BOUND, None),
        (Cause.GPU_THROTTLING, 5),
        (Cause.NONE, None),
    ]


def test_the_wait_of_starved_loaders_is_in_the_account() -> None:
    demo = Demo()
    demo.go(60)
    verdict = verdict_on_mean_step("demo", [*demo.store.ranks()])
    account = some(verdict.account)
    waited = {part.kind: part.seconds for part in account.parts}[PartKind.DATA]
    assert (verdict.cause, account.hidden) == (Cause.INPUT_BOUND, ())
    assert waited == pytest.approx(verdict.cost_seconds_per_step, rel=0.01)


def test_each_rank_has_a_gpu_and_all_have_one_job() -> None:
    demo = Demo()
    owners = [demo.owners.of(rank.identity) for rank in demo.go(1)]
    uuids = [reading.uuid for reading in demo.watch.newest()]
    assert [owner.gpu_uuid for owner in owners] == uuids
    [family] = demo.owners.sample()
    assert [labels for labels, _ in family.samples] == [
        (str(index), uuid, "slurm", owners[0].slurm_job_id) for index, uuid in enumerate(uuids)
    ]
    assert demo.owners.of(RankIdentity("real", 0, slurm_job_id="9")).slurm_job_id == "9"


def test_before_the_first_sample_all_gpus_count_as_fast() -> None:
    demo = Demo(gpus=False)
    demo.now += 10
    demo.ranks.advance()
    [rank, *_] = demo.store.ranks()
    assert rank.totals.train.steps > 20
    assert demo.owners.of(rank.identity).gpu_uuid == ""


def test_after_a_long_sleep_it_goes_on_from_now() -> None:
    demo = Demo()
    [rank, *_] = demo.go(10)
    before = rank.totals.train.steps
    demo.now += 86_400
    demo.ranks.advance()
    assert rank.totals.train.steps == before
    demo.go(10)
    assert 20 < rank.totals.train.steps - before < 40


async def test_it_trains_until_it_is_cancelled() -> None:
    demo = Demo()
    demo.now += 10
    task = asyncio.create_task(demo.ranks.run())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert next(demo.store.ranks()).totals.train.steps > 20


ADMIN = Rights(Caller(0, 1), is_admin=True)
SIMULATED = r"run demo is simulated \(`torchperfd serve --demo`\): it has no processes; start a real one"


@pytest.fixture
def store() -> Store:
    store = Store()
    for rank in range(8):
        store.join(RankIdentity("demo", rank, 8))
    return store


def test_capture_of_simulated_run_says_so(store: Store) -> None:
    targets = Targets(store, lambda _: [], ADMIN)
    with pytest.raises(NoSuchTargetError, match=SIMULATED):
        targets.run("")
    with pytest.raises(NoSuchTargetError, match=SIMULATED):
        targets.ranks("demo", [])


def test_stacks_of_simulated_run_say_so(store: Store) -> None:
    with pytest.raises(NoSuchTargetError, match=SIMULATED):
        choose(store, "demo", [], ADMIN)


def test_stacks_beside_a_simulated_run_are_asked(store: Store) -> None:
    store.join(RankIdentity("bert", 0, pid=7))
    assert [rank.identity.run for rank in choose(store, "bert", [], ADMIN)] == ["bert"]
