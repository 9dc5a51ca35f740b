"""Goodput of a node: what the tracker reads from the store, saves and shows."""

import asyncio
import json
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC
from pathlib import Path

import pytest
from tests.support.golden import check_golden
from tests.support.served import Served, with_daemon
from tests.support.values import some

from torchperfd.document.terminal import render
from torchperfd.model.totals import CudaMemory, PhaseTotals
from torchperfd.v1 import control_pb2, control_pb2_grpc
from torchperfd_daemon.collectors.process import RankProcess
from torchperfd_daemon.goodput.store import Clocks, GoodputStore, packed
from torchperfd_daemon.goodput.totals import Bucket, GoodputTotals, RankGoodput, RunGoodput, by_run
from torchperfd_daemon.goodput.tracker import Exit, ExitOf, GoodputTracker, exit_of
from torchperfd_daemon.metrics.page import goodput_metrics
from torchperfd_daemon.service import translate_diagnosis
from torchperfd_daemon.store.model import KindTotal, RankIdentity, State, Totals
from torchperfd_daemon.store.store import Rank, Store
from torchperfd_daemon.views.documents import goodput_document, to_dict

S = 1_000_000_000
BOOTED = 1_700_000_000.0


class Machine:
    """A node whose clocks a test moves, with a store, a database on disk, and a daemon that can be killed."""

    def __init__(self, folder: Path, exits: ExitOf = lambda *_: None) -> None:
        self.folder = folder
        self._exits = exits
        self.uptime = 1000.0
        self.wall_error = 0.0
        self.boot = "one"
        self.daemon()

    def daemon(self) -> None:
        """Start a daemon; the one before, if any, was killed."""
        self.store = Store(grace_seconds=60, clock=lambda: self.uptime)
        clocks = Clocks(
            boottime_ns=lambda: int(self.uptime * S),
            unix_ns=lambda: int((BOOTED + self.uptime + self.wall_error) * S),
            monotonic=lambda: self.uptime,
        )
        self.saved = GoodputStore(self.folder, "node-a")
        self.tracker = GoodputTracker(self.store, self.saved, clocks, self.boot, exits=self._exits)

    def join(self, pid: int = 1, rank: int = 0) -> Rank:
        """Have a process join that has started two seconds ago."""
        ticks = int((self.uptime - 2) * os.sysconf("SC_CLK_TCK"))
        return self.store.join(
            RankIdentity(run="bert", rank=rank, node="node-a", pid=pid, process_start_ticks=ticks)
        )

    def rejoin(self, rank: Rank) -> Rank:
        """Have a process join that is known already."""
        return self.store.join(rank.identity)

    def train(self, rank: Rank, seconds: int) -> None:
        """Make steps of a second each, half of it in data, which are reported every second."""
        for _ in range(seconds):
            began = rank.totals.began_ns or int((BOOTED + self.uptime + self.wall_error) * S)
            self.uptime += 1
            steps = rank.totals.train.steps + 1
            rank.totals = Totals(
                train=KindTotal(
                    steps=steps, ns=steps * S, phases={"data": PhaseTotals(steps, steps * S // 2)}
                ),
                warmup=KindTotal(steps=1, ns=S),
                began_ns=began,
                ended_ns=int((BOOTED + self.uptime + self.wall_error) * S),
                cuda=CudaMemory(1, 1, 1),
            )
            rank.state = State.TRAINING
            self.sample()

    def sample(self, seconds: int = 0) -> None:
        """Sample once, after as many seconds with a sample each."""
        for _ in range(seconds):
            self.uptime += 1
            asyncio.run(self.tracker.sample())
        asyncio.run(self.tracker.sample())

    def save(self) -> None:
        """Have the tracker save."""
        asyncio.run(self.tracker.save())

    def run(self, name: str = "bert") -> RunGoodput:
        """Return what is known of a run."""
        (found,) = asyncio.run(self.tracker.report(name))
        return found

    def seconds(self) -> dict[str, float]:
        """Return the buckets of the run that are not empty."""
        return {bucket.value: round(time, 3) for bucket, time in self.run().seconds.items() if round(time, 3)}


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A node with a daemon."""
    return Machine(tmp_path / "captures" / ".goodput")


def test_a_run_is_followed_through_a_kill_and_a_new_process(machine: Machine) -> None:
    rank = machine.join(pid=1)
    machine.sample(3)
    machine.train(rank, 10)
    machine.store.leave(rank)
    machine.uptime += 20
    machine.join(pid=2)
    machine.sample(1)
    assert machine.seconds() == {"start_up": 8, "productive": 5, "data_wait": 5, "restart_gap": 18}
    run = machine.run()
    assert (run.restarts, run.ranks[0].gpus, run.ranks[0].running) == (1, 1, True)
    assert some(run.gpu_hours)[Bucket.RESTART_GAP] == pytest.approx(18 / 3600)
    assert run.ratio == pytest.approx(5 / 36)


def test_a_daemon_that_was_killed_knows_all_of_it_again(machine: Machine) -> None:
    rank = machine.join()
    machine.train(rank, 10)
    machine.save()
    machine.train(rank, 3)
    machine.daemon()
    totals = rank.totals
    machine.uptime += 7
    rank = machine.rejoin(rank)
    rank.totals = replace(
        totals,
        train=KindTotal(steps=20, ns=20 * S, phases={"data": PhaseTotals(20, 10 * S)}),
        ended_ns=int((BOOTED + machine.uptime) * S),
    )
    machine.sample()
    assert machine.seconds() == {"start_up": 2, "productive": 10, "data_wait": 10}
    assert machine.run().restarts == 0


def test_run_resumed_after_the_daemon_left_keeps_its_totals(machine: Machine) -> None:
    rank = machine.join(pid=1)
    machine.train(rank, 4)
    rank.state = State.FINISHED
    machine.store.leave(rank)
    machine.sample(1)
    machine.tracker.close()
    machine.uptime += 95
    machine.daemon()
    assert machine.seconds() == {"start_up": 2, "productive": 2, "data_wait": 2}
    machine.join(pid=2)
    machine.sample()
    assert machine.seconds() == {"start_up": 4, "productive": 2, "data_wait": 2, "restart_gap": 94}
    counted = machine.tracker.settled_seconds()["bert"]
    assert counted[Bucket.RESTART_GAP] == 94


@pytest.mark.parametrize("error", [-7200.0, 7200.0])
def test_a_clock_that_is_set_changes_no_sum(machine: Machine, error: float) -> None:
    rank = machine.join()
    machine.train(rank, 10)
    machine.wall_error = error
    machine.train(rank, 10)
    machine.store.leave(rank)
    machine.sample(1)
    machine.tracker.close()
    machine.daemon()
    machine.uptime += 9
    machine.join(pid=2)
    machine.sample()
    assert machine.seconds() == {"start_up": 4, "productive": 10, "data_wait": 10, "restart_gap": 8}


def test_reboot_with_an_earlier_clock_keeps_time_monotonic(machine: Machine) -> None:
    rank = machine.join()
    machine.train(rank, 10)
    machine.tracker.close()
    machine.boot, machine.uptime, machine.wall_error = "two", 30.0, -9999.0
    machine.daemon()
    machine.join(pid=2)
    machine.sample()
    seconds = machine.seconds()
    assert {name: seconds[name] for name in ("productive", "data_wait")} == {"productive": 5, "data_wait": 5}
    assert sum(seconds.values()) == pytest.approx(12, abs=2)


async def test_process_end_is_used_and_its_last_report_counts(tmp_path: Path) -> None:
    """The last report arrives after the last sample."""
    exits = []

    class Ended(Exit):
        def __init__(self) -> None:
            self.at_ns = None

        def close(self) -> None:
            pass

    def watched(process: RankProcess, clock: Callable[[], int]) -> Exit:
        assert process.pid == 1
        exits.append(Ended())
        return exits[-1]

    machine = Machine(tmp_path, watched)
    rank = machine.join()
    await machine.tracker.sample()
    machine.uptime += 3
    rank.totals = Totals(
        train=KindTotal(steps=3, ns=2 * S),
        began_ns=int((BOOTED + machine.uptime - 3) * S),
        ended_ns=int((BOOTED + machine.uptime - 1) * S),
    )
    rank.state = State.FINISHED
    machine.store.leave(rank)
    exits[0].at_ns = int((BOOTED + machine.uptime) * S)
    machine.uptime += 5
    # Not sampled since: the end is reported with everything up to it.
    (run,) = await machine.tracker.report("bert")
    assert not run.ranks[0].running
    found = {bucket.value: round(time, 3) for bucket, time in run.seconds.items() if time}
    assert found == {"start_up": 2, "productive": 2, "shutdown": 1}


async def test_the_end_of_a_real_process_is_seen() -> None:
    child = await asyncio.create_subprocess_exec("cat", stdin=asyncio.subprocess.PIPE)
    seen = some(exit_of(RankProcess("r", 0, child.pid, 0, 0), lambda: 42))
    assert seen.at_ns is None
    assert exit_of(RankProcess("r", 0, child.pid, 0, 1), lambda: 42) is None
    child.kill()
    await child.wait()
    async with asyncio.timeout(20):
        while seen.at_ns is None:  # noqa: ASYNC110 - there is nothing to wait on
            await asyncio.sleep(0)
    assert seen.at_ns == 42
    seen.close()


def test_rows_are_bounded_and_the_oldest_go(tmp_path: Path) -> None:
    saved = GoodputStore(tmp_path, "n", most_rows=3)
    for number in range(5):
        saved.save({(f"run-{number}", 0): packed(GoodputTotals.begin("a", number))}, number * S)
    assert sorted(run for run, _ in saved.newest(10)) == ["run-2", "run-3", "run-4"]
    assert list(saved.newest(1)) == [("run-4", 0)]
    saved.save({("late", 0): packed(GoodputTotals.begin("a", 0))}, 91 * 86_400 * S)
    assert list(saved.newest(10)) == [("late", 0)]
    saved.close()


def test_damaged_store_is_set_aside_and_missing_one_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "n.sqlite").write_bytes(b"no database" * 500)
    saved = GoodputStore(tmp_path, "n")
    saved.save({("run", 0): packed(GoodputTotals.begin("a", 1))}, S)
    assert list(saved.load("run")) == [("run", 0)]
    saved.close()
    assert (tmp_path / "n.damaged").exists()
    caplog.clear()
    blocked = GoodputStore(tmp_path / "n.sqlite" / "below", "n")
    with caplog.at_level(logging.WARNING):
        blocked.save({("run", 0): packed(GoodputTotals.begin("a", 1))}, S)
        assert blocked.load("run") == {}
    assert len(caplog.records) == 1


def test_a_folder_that_others_can_write_is_not_trusted(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    saved = GoodputStore(tmp_path, "n")
    saved.save({("run", 0): packed(GoodputTotals.begin("a", 1))}, S)
    assert saved.load("run") == {}
    assert list(tmp_path.iterdir()) == []


def run_of(name: str, *ranks: tuple[int, dict[Bucket, float]], starts: int = 1, gpus: int = 1) -> RunGoodput:
    """Return a run that has begun at a fixed moment."""
    made = []
    for rank, results in ranks:
        seconds = {bucket: results.get(bucket, 0.0) for bucket in Bucket}
        until = BOOTED + sum(seconds.values())
        made.append((name, RankGoodput(rank, BOOTED, until, starts, gpus, False, seconds)))
    return by_run(made)[0]


RUNS = [
    run_of(
        "bert-17",
        (1, {Bucket.START_UP: 95.5, Bucket.PRODUCTIVE: 80_000, Bucket.COMMUNICATION_WAIT: 6_304.5}),
        (0, {Bucket.START_UP: 95.5, Bucket.PRODUCTIVE: 86_000, Bucket.STALL: 304.5}),
        starts=3,
    ),
    run_of("tiny", (0, {Bucket.START_UP: 2.5, Bucket.PRODUCTIVE: 1.25}), gpus=0),
]


def test_the_tables_are_the_golden_ones() -> None:
    check_golden("goodput.txt", render(goodput_document(RUNS, UTC)) + "\n")


def test_the_document_and_the_messages_say_the_same() -> None:
    again = [
        translate_diagnosis.run_goodput_from_message(translate_diagnosis.run_goodput_to_message(run))
        for run in RUNS
    ]
    assert to_dict(again) == to_dict(RUNS)
    bert, tiny = json.loads(json.dumps(to_dict(RUNS)))["runs"]
    assert bert["goodput_ratio"] == 166_000 / bert["rank_seconds"]
    assert bert["lost_gpu_hours"]["stall"] == pytest.approx(304.5 / 3600)
    assert "productive" not in bert["lost_gpu_hours"]
    assert (bert["restarts"], tiny["lost_gpu_hours"]) == (2, None)


def test_counters_are_of_runs_that_are_here(machine: Machine) -> None:
    rank = machine.join()
    machine.train(rank, 4)
    (family,) = goodput_metrics(machine.tracker.settled_seconds)
    assert len(family.samples) == len(Bucket)
    assert dict(family.samples)["bert", "productive"] == 2
    machine.store.leave(rank)
    machine.sample(1)
    machine.uptime += 100
    machine.store.forget_departed()
    machine.sample()
    machine.save()
    (family,) = goodput_metrics(machine.tracker.settled_seconds)
    assert family.samples == []


@with_daemon
async def test_the_service_answers_with_nothing_where_nothing_is_kept(
    served: Served, channel: object
) -> None:
    stub = control_pb2_grpc.ControlStub(channel)  # type: ignore[arg-type]
    assert not (await stub.GetGoodput(control_pb2.GetGoodputRequest())).runs  # type: ignore[misc]
