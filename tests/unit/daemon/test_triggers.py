"""Triggers at work: what acts, what is held back and why, and what is written. Time is the test's."""

import asyncio
import json
import logging
from array import array
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from tests.support.served import GIVE_UP_S

from torchperfd.model.totals import PhaseTotals
from torchperfd_cli.commands.capture import repeat
from torchperfd_daemon.captures.catalog import Catalog
from torchperfd_daemon.captures.coordinator import Coordinator
from torchperfd_daemon.captures.index import Query
from torchperfd_daemon.captures.manifest import CaptureOptions, CaptureState, RankFacts
from torchperfd_daemon.captures.rank_attempts import Ack, Participant, Result
from torchperfd_daemon.config.effective import read_plan
from torchperfd_daemon.errors import (
    DeadlineError,
    NoSuchTargetError,
    PartialResultError,
    TorchperfdError,
    UsageError,
)
from torchperfd_daemon.metrics.page import MetricsPage, trigger_metrics
from torchperfd_daemon.observer.observer import Observer
from torchperfd_daemon.stacks.model import Frame, Outcome, RankStacks, Thread
from torchperfd_daemon.store.model import KindTotal, RankIdentity, State, StepColumns, Totals
from torchperfd_daemon.store.store import Rank, Store
from torchperfd_daemon.triggers import rules
from torchperfd_daemon.triggers.plan import Plan, Rule, Schedule, When
from torchperfd_daemon.triggers.rules import Actions, CostMeter, ScheduleState, TriggerCounts, TriggerQuota
from torchperfd_daemon.triggers.runner import Runner, with_a_peer

NOON = 1_800_014_400.0  # of a day of UTC
DAY = 86400.0


class Clock:
    """Both clocks at once."""

    def __init__(self) -> None:
        self.now = 5000.0
        self.waiting: list[asyncio.Future[None]] = []
        self.asleep = asyncio.Event()

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return NOON + self.now - 5000.0

    async def sleep(self, seconds: float) -> None:
        """Wait until the test says that time has passed."""
        self.waiting.append(asyncio.get_running_loop().create_future())
        self.asleep.set()
        await self.waiting[-1]


class Trainer:
    """A connected rank that takes part in every capture, at a cost."""

    def __init__(self, node: "TriggeredNode", rank: int) -> None:
        self.rank = rank
        self.steps_seen = 0
        self.facts = RankFacts("node-a", 100 + rank)
        self.node = node
        self.asked: list[CaptureOptions] = []
        self.cost_ms = 0.0
        self.answers = True

    def prepare(self, capture_id: str, options: CaptureOptions, directory: Path, max_bytes: int) -> None:
        self.asked.append(options)
        self._later(lambda: self.node.coordinator.on_ack(capture_id, self.rank, Ack(True, "", 100, 0.1)))

    def commit(self, capture_id: str, start_step: int, steps: int) -> None:
        if not self.answers:
            return
        self.node.train(self.rank, 100 * steps + self.cost_ms, steps)
        name = f"rank{self.rank}.json"
        (self.node.catalog.folder(capture_id) / name).write_text("{}")
        result = Result(True, "", False, start_step, name, 2, "ab")
        self._later(lambda: self.node.coordinator.on_result(capture_id, self.rank, result))

    def cancel(self, capture_id: str, reason: str) -> None:
        pass

    def _later(self, call: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_soon(call)


class TriggeredNode:
    """A daemon's parts around a runner; ``ranks`` train a step of 100 ms ten times a second."""

    def __init__(self, directory: Path, plan: Plan, ranks: int = 3) -> None:
        self.clock = Clock()
        self.store = Store()
        self.catalog = Catalog(directory, wall=self.clock.wall)
        self.coordinator = Coordinator(self.catalog, wall=self.clock.wall)
        self.counts: TriggerCounts = {}
        self.trainers = [Trainer(self, rank) for rank in range(ranks)]
        self.records: list[Rank] = []
        self.reported: list[RankStacks] = []
        for rank in range(ranks):
            record = self.store.join(RankIdentity("bert", rank, world_size=ranks, node="node-a"))
            record.state = State.TRAINING
            self.records.append(record)
        self.observer = Observer(self.store, self._ask, clock=self.clock.monotonic, wall=self.clock.wall)
        actions = Actions(self.coordinator, self.catalog, self.participants, self.stacks, self.clock.wall)
        self.runner = Runner(
            plan,
            self.store,
            self.observer.findings,
            list,
            actions,
            self.clock.monotonic,
            self.clock.wall,
            self.counts,
            self.clock.sleep,
        )

    def participants(self, run: str) -> Sequence[Participant]:
        return self.trainers if run == "bert" else []

    async def stacks(self, run: str, seconds: float) -> AsyncIterator[RankStacks]:
        for rank in self.reported:
            yield rank

    def train(self, rank: int, total_ms: float, steps: int = 10) -> None:
        before = self.records[rank].totals.train
        step_ns = int(total_ms / steps * 1e6)
        now_ns = int(self.clock.wall() * 1e9)
        ends = array("q", [now_ns - step_ns * left for left in reversed(range(steps))])
        durations = array("q", [step_ns] * steps)
        self.store.add_steps(self.records[rank], StepColumns(ends, durations, {"forward": durations}))
        ns = before.ns + sum(durations)
        phases = {"forward": PhaseTotals(before.steps + steps, ns)}
        train = KindTotal(before.steps + steps, ns, phases=phases)
        self.records[rank].totals = Totals(train=train)

    async def pass_time(self, seconds: int, step_ms: float = 100.0) -> None:
        """Let seconds pass; with a step time of 0 no rank trains. All actions end."""
        for _ in range(seconds):
            self.clock.now += 1.0
            if step_ms:
                for rank in range(len(self.records)):
                    self.train(rank, 10 * step_ms)
            self.observer.sample()
            self.runner.evaluate()
            await self.settle()

    async def _ask(self, ranks: Iterable[Rank], seconds: float) -> AsyncIterator[RankStacks]:
        for rank in self.reported:
            yield rank

    async def settle(self) -> None:
        while self.runner.is_acting:
            for future in self.clock.waiting:
                if not future.done():
                    future.set_result(None)
            await asyncio.sleep(0)

    def results(self, name: str) -> dict[str, int]:
        """Return what has become of a trigger, where that is more than nothing."""
        return {
            result.value: count for (rule, result), count in self.counts.items() if rule == name and count
        }

    def captured(self) -> list[tuple[str, str, list[int]]]:
        """Return trigger, state and ranks of each capture, oldest first."""
        listed = self.catalog.list(Query()).captures
        return [
            (each.record.trigger, each.record.state.value, [rank.rank for rank in each.record.ranks])
            for each in reversed(listed)
        ]


def plan(*tables: Mapping[str, object], per_day: int = 50) -> Plan:
    return read_plan({"per_day": per_day}, list(tables), "a test")


SLOW = {"name": "slow", "when": "step-time-regression", "for": 0, "steps": 2}
STALL = {"when": "stall"}


async def test_a_run_that_becomes_slow_is_captured_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    node = TriggeredNode(tmp_path, plan({**SLOW, "for": "5s"}))
    with caplog.at_level(logging.INFO, "torchperfd.triggers"):
        await node.pass_time(60)
        await node.pass_time(40, 150)
    ((trigger, state, ranks),) = node.captured()
    assert (trigger, state, len(ranks)) == ("slow", "complete", 2)
    assert node.trainers[ranks[0]].asked == [CaptureOptions(steps=2)]
    assert node.results("slow") == {"fired": 1}
    first, second = [each.getMessage() for each in caplog.records if each.name == "torchperfd.triggers"]
    assert first == "trigger slow: a step of run bert takes 150 ms, 50% more than before"
    assert second.startswith("trigger slow fired: capture ")
    assert second.endswith(" is complete")


async def test_a_healthy_run_is_left_alone(tmp_path: Path) -> None:
    node = TriggeredNode(tmp_path, plan(SLOW, STALL, {"when": "straggler"}))
    await node.pass_time(120)
    assert node.captured() == []
    assert not any(node.counts.values())


def reported(rank: int, outcome: Outcome, *frames: Frame) -> RankStacks:
    threads = (Thread(1, "MainThread", True, False, frames),) if frames else ()
    return RankStacks(rank, 2, "node-a", 100 + rank, outcome, "" if frames else "it has finished", threads)


async def test_a_stall_writes_stacks_that_are_listed_as_a_capture(tmp_path: Path) -> None:
    node = TriggeredNode(tmp_path, plan(STALL), ranks=2)
    node.reported = [
        reported(1, Outcome.GONE),
        reported(0, Outcome.ANSWERED, Frame("/job/train.py", 7, "load\udcff")),
    ]
    await node.pass_time(5)
    await node.pass_time(40, 0)
    (listed,) = node.catalog.list(Query()).captures
    record = listed.record
    assert (record.trigger, record.run, record.state) == ("stall", "bert", CaptureState.PARTIAL)
    assert record.reason == "rank 1: gone: it has finished"
    assert [(rank.rank, rank.state.value, rank.file) for rank in record.ranks] == [
        (0, "complete", "stacks.json"),
        (1, "failed", ""),
    ]
    folder = node.catalog.folder(record.capture_id)
    document = json.loads((folder / "stacks.json").read_bytes())
    assert (document["schema"], document["run"]) == ("torchperfd.stacks/1", "bert")
    assert (folder / "stacks.json").stat().st_size == record.ranks[0].bytes
    assert "rank 0 is at train.py:7 in load?" in (folder / "stacks.txt").read_text()
    assert node.results("stall") == {"fired": 1}
    assert node.coordinator.counts.requests == {("stall", "partial"): 1}


async def test_second_stall_waits_for_the_cooldown_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    node = TriggeredNode(tmp_path, plan({**STALL, "cooldown": "5m"}), ranks=1)
    node.reported = [reported(0, Outcome.ANSWERED, Frame("/job/train.py", 7, "load"))]
    await node.pass_time(5)
    await node.pass_time(20, 0)
    assert node.results("stall") == {"fired": 1}
    await node.pass_time(20)
    with caplog.at_level(logging.INFO, "torchperfd.triggers"):
        await node.pass_time(60, 0)
    assert node.results("stall") == {"fired": 1, "cooldown": 1}
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("trigger stall cooldown: run bert has made no step for 1")
    await node.pass_time(240, 0)
    # It still stands still when the cooldown is over.
    assert node.results("stall") == {"fired": 2, "cooldown": 1}


async def test_rule_during_a_capture_of_the_run_acts_afterwards(tmp_path: Path) -> None:
    node = TriggeredNode(tmp_path, plan(SLOW))
    for trainer in node.trainers:
        trainer.answers = False
    await node.pass_time(60)
    people = node.coordinator.capture("bert", list(node.trainers), CaptureOptions(), 60.0)
    await anext(people)
    await node.pass_time(20, 150)
    assert node.results("slow") == {"busy": 1}
    await people.aclose()  # type: ignore[attr-defined]
    for trainer in node.trainers:
        trainer.answers = True
    await node.pass_time(2, 150)
    assert node.results("slow") == {"busy": 1, "fired": 1}
    assert [each[0] for each in node.captured()] == ["command", "slow"]


async def test_what_cannot_be_done_has_failed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    node = TriggeredNode(tmp_path / "file", plan(SLOW))
    await node.pass_time(60)
    await node.pass_time(20, 150)
    assert node.results("slow") == {"failed": 1}


async def test_a_rule_that_breaks_costs_itself_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("torchperfd_daemon.triggers.conditions.Straggler.evaluate", lambda *_: 1 / 0)
    node = TriggeredNode(tmp_path, plan({"when": "straggler"}, SLOW))
    await node.pass_time(60)
    await node.pass_time(20, 150)
    assert node.results("slow") == {"fired": 1}
    assert [record.getMessage() for record in caplog.records if record.exc_info] == [
        "evaluating trigger straggler failed; further failures are not logged"
    ]


async def test_a_restart_renews_neither_budget_nor_cooldown(tmp_path: Path) -> None:
    node = TriggeredNode(tmp_path, plan(SLOW))

    async def slow() -> None:
        await node.pass_time(60)
        await node.pass_time(20, 150)

    await slow()
    node = TriggeredNode(tmp_path, plan(SLOW))
    running = asyncio.create_task(node.runner.run(node.catalog))
    await asyncio.wait_for(node.clock.asleep.wait(), GIVE_UP_S)
    await slow()
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    assert node.results("slow") == {"cooldown": 1}


async def test_without_triggers_nothing_runs(tmp_path: Path) -> None:
    node = TriggeredNode(tmp_path, Plan())
    await node.runner.run(node.catalog)
    assert node.clock.waiting == []


def test_metric_has_every_trigger_and_result_from_the_start(tmp_path: Path) -> None:
    node = TriggeredNode(tmp_path, plan(STALL, {"every": "10m"}))
    body = MetricsPage([lambda: trigger_metrics(node.counts)]).render("")[0].decode()
    assert body.count('torchperfd_triggers_total{result="') == 10
    assert 'torchperfd_triggers_total{result="busy",rule="glance"} 0.0' in body


class TestDesk:
    RULE = Rule("r", When.STALL, cooldown_seconds=60.0, per_day=3)

    @pytest.fixture
    def clock(self) -> Clock:
        return Clock()

    def limits(self, clock: Clock, per_day: int = 50) -> TriggerQuota:
        return TriggerQuota(Plan(rules=(self.RULE,), per_day=per_day), clock.monotonic, clock.wall)

    def test_a_run_has_its_own_cooldown(self, clock: Clock) -> None:
        limits = self.limits(clock)
        assert [limits.admit(self.RULE, run) for run in ("a", "b", "a")] == [
            None,
            None,
            rules.Result.COOLDOWN,
        ]
        clock.now += 60.0
        assert limits.admit(self.RULE, "a") is None

    def test_a_budget_lasts_until_midnight_utc(self, clock: Clock) -> None:
        limits = self.limits(clock)
        results = []
        for _ in range(24 * 60 // 5):
            results.append(limits.admit(self.RULE, "a"))
            clock.now += 300.0
        # Twelve hours to midnight, twelve hours after.
        assert results.count(None) == 6
        assert [number for number, result in enumerate(results) if result is None] == [0, 1, 2, 144, 145, 146]
        assert results.count(rules.Result.BUDGET) == len(results) - 6

    def test_all_rules_share_a_budget(self, clock: Clock) -> None:
        limits = self.limits(clock, per_day=2)
        other = Rule("other", When.XID)
        assert [limits.admit(self.RULE, "a"), limits.admit(other, "a")] == [None, None]
        assert [limits.admit(self.RULE, "b"), limits.admit(other, "b")] == [rules.Result.BUDGET] * 2

    def test_what_could_not_act_has_used_nothing_up(self, clock: Clock) -> None:
        limits = self.limits(clock, per_day=1)
        for _ in range(5):
            assert limits.admit(self.RULE, "a") is None
            limits.give_back(self.RULE, "a")

    def test_what_was_done_yesterday_counts_for_the_cooldown_only(self, clock: Clock) -> None:
        rule = Rule("r", When.STALL, cooldown_seconds=DAY, per_day=1)
        limits = TriggerQuota(Plan(rules=(rule,)), clock.monotonic, clock.wall)
        limits.remember(rule, "a", NOON - 13 * 3600)
        assert [limits.admit(rule, "a"), limits.admit(rule, "b")] == [rules.Result.COOLDOWN, None]


class TestGlances:
    async def test_one_rank_at_a_time_is_captured_for_one_step(self, tmp_path: Path) -> None:
        node = TriggeredNode(tmp_path, plan({"every": "60s", "overhead": 0.01}))
        await node.pass_time(4 * 60)
        assert node.captured() == [("glance", "complete", [rank]) for rank in (0, 1, 2, 0)]
        assert node.trainers[1].asked == [CaptureOptions(steps=1)]
        assert node.results("glance") == {"fired": 4}

    async def test_glances_that_cost_too_much_come_less_often(self, tmp_path: Path) -> None:
        node = TriggeredNode(tmp_path, plan({"every": "60s", "overhead": 0.01}), ranks=1)
        # 1.5 s of a training that may lose a hundredth: one in 150 s, on a grid of 60 s.
        node.trainers[0].cost_ms = 1500.0
        await node.pass_time(10 * 60)
        assert node.results("glance") == {"fired": 4, "budget": 6}

    async def test_ranks_that_do_not_train_are_not_captured(self, tmp_path: Path) -> None:
        node = TriggeredNode(tmp_path, plan({"every": "60s"}))
        for record in node.records:
            record.state = State.CHECKPOINTING
        await node.pass_time(200)
        assert node.captured() == []
        assert node.results("glance") == {}

    def test_rotation_covers_ranks_and_skips_those_gone(self, tmp_path: Path) -> None:
        schedule = ScheduleState(Schedule("glance", 60.0), 0.0)
        node = TriggeredNode(tmp_path, plan(), ranks=4)
        for rank in range(4):
            node.train(rank, 1000)
        order = [schedule.next(node.records) for _ in range(3)] + [
            schedule.next(node.records[:2]) for _ in range(3)
        ]
        assert [rank.identity.rank for rank in order if rank] == [0, 1, 2, 0, 1, 0]
        assert schedule.next([]) is None

    def test_a_cost_is_what_steps_take_beyond_the_usual(self, tmp_path: Path) -> None:
        node = TriggeredNode(tmp_path, plan(), ranks=1)
        node.train(0, 1000)
        meter = CostMeter(node.records[0])
        node.train(0, 700, steps=4)
        assert meter.seconds() == pytest.approx(0.3)
        node.train(0, 300, steps=8)
        assert meter.seconds() == 0.0


def test_a_capture_is_of_two_culprits_at_most_and_a_median_peer(tmp_path: Path) -> None:
    node = TriggeredNode(tmp_path, plan(), ranks=5)
    for rank, own_ms in enumerate((90, 100, 300, 95, 110)):
        node.train(rank, own_ms * 10)
    assert with_a_peer((2,), node.records) == [2, 3]
    assert with_a_peer((), node.records) == [1]
    assert with_a_peer((0, 1, 2, 3, 4), node.records) == [0, 1]
    assert with_a_peer((7,), []) == [7]


class TestRepeat:
    """``capture --every``."""

    def run(self, outcomes: Iterator[TorchperfdError | float]) -> tuple[list[float], BaseException | None]:
        """Repeat every 10 s what takes so long or fails, until there is no more; return when it began."""
        now, began = [0.0], list[float]()

        def once() -> None:
            began.append(now[0])
            outcome = next(outcomes, None)
            if outcome is None:
                raise KeyboardInterrupt
            if isinstance(outcome, TorchperfdError):
                raise outcome
            now[0] += outcome

        def sleep(seconds: float) -> None:
            now[0] += seconds

        try:
            repeat(10.0, once, lambda: now[0], sleep)
        except TorchperfdError as error:
            return began, error
        return began, None

    def test_it_keeps_to_its_grid_and_never_overlaps(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert self.run(iter([1.0, 2.0, 25.0, 10.0])) == ([0.0, 10.0, 20.0, 50.0, 70.0], None)
        assert capsys.readouterr().err == "4 made, 0 of them failed or are partial\n"

    def test_what_fails_is_said_and_tried_again(self, capsys: pytest.CaptureFixture[str]) -> None:
        began, error = self.run(iter([DeadlineError("no steps", "train"), 1.0]))
        assert began == [0.0, 10.0, 20.0]
        assert isinstance(error, PartialResultError)
        assert capsys.readouterr().err == (
            "torchperfd: no steps; train\n2 made, 1 of them failed or are partial\n"
        )

    @pytest.mark.parametrize("fatal", [UsageError("what?"), NoSuchTargetError("no run")])
    def test_what_can_never_succeed_ends_it(self, fatal: TorchperfdError) -> None:
        assert self.run(iter([1.0, fatal])) == ([0.0, 10.0], fatal)
