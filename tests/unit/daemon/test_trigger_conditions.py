"""Conditions on a hand-fed store: what fires them, and what must not."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from prometheus_client.core import GaugeMetricFamily, Metric

from torchperfd_daemon.config.trigger_tables import read_plan
from torchperfd_daemon.store import (
    HISTOGRAM_BOUNDS_S,
    Histogram,
    KindTotal,
    PhaseTotal,
    RankIdentity,
    State,
    Store,
    Totals,
)
from torchperfd_daemon.triggers.conditions import Finding, condition_of, longest_step_seconds
from torchperfd_daemon.triggers.pace import KEPT, RECENT, Paces
from torchperfd_daemon.triggers.rules import Rule, When
from torchperfd_daemon.triggers.scene import Scene

MS = 1_000_000


def rule(when: str, **more: object) -> Rule:
    return read_plan({}, [{"when": when, **more}], "a test").rules[0]


@dataclass
class Node:
    """A store, fed second by second, and the metrics page beside it."""

    rule: Rule
    ranks: int = 4
    world: Store = field(default_factory=Store)
    page: dict[str, list[tuple[dict[str, str], float]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.now = 1000.0
        self.paces = Paces()
        self.condition = condition_of(self.rule)
        self.records = [
            self.world.join(RankIdentity("bert", rank, world_size=self.ranks)) for rank in range(self.ranks)
        ]
        self.page["torchperfd_train_rank_info"] = [
            ({"run": "bert", "rank": str(rank), "gpu_uuid": f"GPU-{rank}"}, 1.0) for rank in range(self.ranks)
        ]
        for record in self.records:
            record.state = State.TRAINING

    def train(self, rank: int, step_ms: float, wait_ms: float = 0.0, steps: int = 10) -> None:
        """Let a rank report steps."""
        record = self.records[rank]
        before = record.totals.train
        waited = before.phases.get("collective_wait", PhaseTotal()).ns + int(steps * wait_ms * MS)
        durations = array("q", [int(step_ms * MS)] * steps)
        self.world.histograms.setdefault("bert", Histogram()).observe_ns(durations)
        record.totals = Totals(
            train=KindTotal(
                before.steps + steps,
                before.ns + sum(durations),
                phases={"collective_wait": PhaseTotal(ns=waited)},
            ),
            validate=record.totals.validate,
        )

    def look(self, seconds: float = 1.0) -> list[Finding]:
        self.now += seconds
        self.paces.look(self.records, self.now)
        scene = Scene(self.now, self.paces, self.world.histograms, self._metrics)
        return list(self.condition.look(scene))

    def run(self, seconds: int, step_ms: float = 100.0) -> list[Finding]:
        """Let all ranks train alike, with a little noise; return what was found at the end."""
        found = []
        for second in range(seconds):
            for rank in range(self.ranks):
                self.train(rank, step_ms * (1 + 0.01 * ((7 * second + rank) % 5 - 2)))
            found = self.look()
        return found

    def gauge(self, name: str, value: float, **labels: str) -> None:
        """Put one series on the page, in the place of the one with these labels."""
        others = [each for each in self.page.get(name, []) if each[0] != labels]
        self.page[name] = [*others, (labels, value)]

    def _metrics(self) -> Iterable[Metric]:
        for name, series in self.page.items():
            family = GaugeMetricFamily(name, "", labels=sorted(series[0][0]))
            for labels, value in series:
                family.add_metric([labels[label] for label in sorted(labels)], value)
            yield family


def ranks(found: list[Finding]) -> list[tuple[int, ...]]:
    return [finding.ranks for finding in found]


class TestStepTimeRegression:
    def test_a_run_that_becomes_slow_is_found_and_its_culprit_named(self) -> None:
        node = Node(rule("step-time-regression"))
        assert node.run(60) == []
        found: list[Finding] = []
        for _ in range(RECENT):
            for rank in range(4):
                # All steps take longer; three of the ranks only wait for the fourth.
                node.train(rank, 130, wait_ms=0 if rank == 2 else 30)
            found = found or node.look()
        assert ranks(found) == [(2,)]
        assert found[0].reason == "a step of run bert takes 0.13 s, 30% more than before"

    @pytest.mark.parametrize("slower", [1.0, 1.1, 0.7])
    def test_what_is_not_slower_than_the_bound_is_not_found(self, slower: float) -> None:
        node = Node(rule("step-time-regression"))
        node.run(60)
        assert node.run(30, 100 * slower) == []

    def test_noise_is_not_found(self) -> None:
        node = Node(rule("step-time-regression", above=0.05))
        for second in range(200):
            for rank in range(4):
                node.train(rank, 100 + 40 * ((second * 7919) % 11) / 11)
            assert node.look() == []

    def test_a_few_slow_seconds_are_not_found(self) -> None:
        node = Node(rule("step-time-regression"))
        node.run(60)
        assert node.run(RECENT // 2 - 1, 500) == []

    def test_a_young_run_has_no_past(self) -> None:
        node = Node(rule("step-time-regression"))
        node.run(10)
        assert node.run(20, 300) == []

    def test_validation_and_checkpoints_between_steps_are_not_found(self) -> None:
        node = Node(rule("step-time-regression"))
        node.run(60)
        for record in node.records:
            record.state = State.VALIDATING
        assert [node.look() for _ in range(30)] == [[]] * 30
        for record in node.records:
            record.state = State.TRAINING
        assert node.run(20) == []


class TestStraggler:
    def feed(self, node: Node, own: dict[int, float], seconds: int = 10) -> list[Finding]:
        """All steps take as long as the slowest rank's own work; the others wait for it."""
        found = []
        for _ in range(seconds):
            for rank, work in own.items():
                node.train(rank, max(own.values()), wait_ms=max(own.values()) - work)
            found = node.look()
        return found

    def test_the_rank_that_the_others_wait_for_is_found(self) -> None:
        found = self.feed(Node(rule("straggler")), {0: 80, 1: 81, 2: 120, 3: 79})
        assert ranks(found) == [(2,)]
        assert found[0].reason == "rank 2 of run bert works 0.12 s a step, its peers 0.08 s"

    def test_one_of_two_is_found(self) -> None:
        assert ranks(self.feed(Node(rule("straggler"), ranks=2), {0: 80, 1: 120})) == [(1,)]

    def test_equal_ranks_and_lone_ones_are_not_found(self) -> None:
        assert self.feed(Node(rule("straggler")), {0: 80, 1: 90, 2: 85, 3: 95}) == []
        assert self.feed(Node(rule("straggler"), ranks=1), {0: 80}) == []

    def test_peers_that_differ_anyway_are_not_found(self) -> None:
        assert self.feed(Node(rule("straggler", above=0.05)), {0: 60, 1: 80, 2: 100, 3: 125}) == []

    def test_a_rank_that_validates_is_not_compared(self) -> None:
        node = Node(rule("straggler"))
        node.records[2].state = State.VALIDATING
        assert self.feed(node, {0: 80, 1: 81, 2: 120, 3: 79}) == []


class TestStall:
    def test_a_run_that_stands_still_is_found_after_ten_seconds(self) -> None:
        node = Node(rule("stall"))
        assert node.run(20) == []
        assert [bool(node.look()) for _ in range(12)] == [False] * 10 + [True] * 2
        assert ranks(node.look()) == [(0, 1, 2, 3)]
        assert node.run(1) == []

    def test_slow_steps_are_waited_for(self) -> None:
        node = Node(rule("stall"))
        for _ in range(5):
            for rank in range(4):
                node.train(rank, 4000, steps=1)
            assert node.look(4) == []
        assert node.look(8 * 5) == []
        assert ranks(node.look(1)) == [(0, 1, 2, 3)]

    @pytest.mark.parametrize("state", [State.VALIDATING, State.CHECKPOINTING, State.FINISHED, State.STARTING])
    def test_what_is_not_training_does_not_stall_and_training_begins_anew_after_it(
        self, state: State
    ) -> None:
        node = Node(rule("stall"))
        node.run(20)
        for record in node.records:
            record.state = state
        assert node.look(3600) == []
        for record in node.records:
            record.state = State.TRAINING
        assert node.look(9) == []
        assert ranks(node.look(2)) == [(0, 1, 2, 3)]

    def test_before_the_first_step_nothing_stalls(self) -> None:
        assert Node(rule("stall")).look(3600) == []

    def test_the_one_that_stands_still_is_named(self) -> None:
        node = Node(rule("stall", **{"for": "30s"}))
        node.run(20)
        for _ in range(31):
            for rank in (0, 1, 3):
                node.train(rank, 100)
            found = node.look()
        assert ranks(found) == [(2,)]


class TestGpus:
    def test_a_gpu_that_becomes_idle_is_found(self) -> None:
        node = Node(rule("gpu-utilisation-drop"))
        name = "torchperfd_gpu_utilization_ratio"
        for second in range(60):
            for rank in range(4):
                node.gauge(name, 0.9 - 0.01 * (second % 3), gpu=str(rank), gpu_uuid=f"GPU-{rank}")
            assert node.look() == []
        node.gauge(name, 0.2, gpu="3", gpu_uuid="GPU-3")
        found = [node.look() for _ in range(RECENT)][-1]
        assert ranks(found) == [(3,)]
        assert found[0].reason == "GPU 3 of rank 3, run bert is used 20%, it was 89%"

    def test_a_gpu_that_idles_while_its_rank_validates_or_was_idle_before_is_not_found(self) -> None:
        node = Node(rule("gpu-utilisation-drop"))
        name = "torchperfd_gpu_utilization_ratio"
        for _ in range(60):
            node.gauge(name, 0.9, gpu="0", gpu_uuid="GPU-0")
            node.gauge(name, 0.1, gpu="1", gpu_uuid="GPU-1")
            node.gauge(name, 0.9, gpu="9", gpu_uuid="GPU-of-nobody")
            node.look()
        node.records[0].state = State.VALIDATING
        for gpu, uuid in (("0", "GPU-0"), ("1", "GPU-1"), ("9", "GPU-of-nobody")):
            node.gauge(name, 0.0, gpu=gpu, gpu_uuid=uuid)
        assert [node.look() for _ in range(60)] == [[]] * 60

    def test_an_error_of_the_driver_holds_for_a_minute(self) -> None:
        node = Node(rule("xid"))
        name = "torchperfd_gpu_xid_errors_total"
        node.gauge(name, 1, gpu="1", gpu_uuid="GPU-1", xid="31")
        assert node.look() == []
        node.gauge(name, 1, gpu="1", gpu_uuid="GPU-1", xid="79")
        found = node.look()
        assert ranks(found) == [(1,)]
        assert found[0].reason == "the driver reports XID 79 on GPU GPU-1 of rank 1, run bert"
        assert node.look(59) == found
        assert node.look(2) == []
        node.gauge(name, 2, gpu="1", gpu_uuid="GPU-1", xid="79")
        assert node.look() == found

    def test_an_error_of_a_gpu_without_a_rank_concerns_no_run(self) -> None:
        node = Node(rule("xid", xids=[13]))
        node.gauge("torchperfd_gpu_xid_errors_total", 1, gpu="7", gpu_uuid="GPU-7", xid="13")
        assert [(finding.run, finding.ranks) for finding in node.look()] == [("", ())]

    def test_a_gpu_that_is_nearly_full_is_found(self) -> None:
        node = Node(rule("gpu-memory-near-full", above=0.9))
        for rank, used in enumerate((89, 90, 91, 50)):
            node.gauge("torchperfd_gpu_memory_total_bytes", 100.0, gpu=str(rank), gpu_uuid=f"GPU-{rank}")
            node.gauge("torchperfd_gpu_memory_used_bytes", used, gpu=str(rank), gpu_uuid=f"GPU-{rank}")
        found = node.look()
        assert [(finding.ranks, finding.reason) for finding in found] == [
            ((2,), "GPU 2 of rank 2, run bert is 91.0% full")
        ]


class TestMetric:
    def test_a_gauge_beyond_its_bound_is_found(self) -> None:
        name = "torchperfd_train_dataloader_ready_batches"
        node = Node(rule("metric", metric=name, below=1, labels={"rank": "2"}))
        for rank, ready in enumerate((0, 5, 0, 5)):
            node.gauge(name, ready, run="bert", rank=str(rank))
        found = node.look()
        assert [(finding.run, finding.ranks) for finding in found] == [("bert", (2,))]
        assert found[0].reason == f"{name}{{rank=2, run=bert}} is 0"
        node.gauge(name, 1, run="bert", rank="2")
        assert node.look() == []

    def test_of_a_counter_it_is_the_rate(self) -> None:
        name = "torchperfd_train_gc_seconds_total"
        node = Node(rule("metric", metric=name, above=0.5))
        counted = 1e6
        for per_second, expected in ((0.2, False), (0.8, True), (0.1, False)):
            for _ in range(20):
                counted += per_second
                node.gauge(name, counted, run="bert", rank="0")
                found = node.look()
            assert bool(found) is expected
        node.gauge(name, 3.0, run="bert", rank="0")
        assert node.look() == []

    @pytest.mark.parametrize(
        ("labels", "expected"),
        [
            ({"gpu": "1", "gpu_uuid": "GPU-1"}, [("bert", (1,))]),
            ({"gpu": "9", "gpu_uuid": "GPU-9"}, []),
            ({"run": "bert"}, [("bert", ())]),
            ({"resource": "io"}, [("bert", ())]),
        ],
    )
    def test_what_a_series_is_about(
        self, labels: dict[str, str], expected: list[tuple[str, tuple[int, ...]]]
    ) -> None:
        node = Node(rule("metric", metric="torchperfd_clients", above=0))
        node.gauge("torchperfd_clients", 1.0, **labels)
        assert [(finding.run, finding.ranks) for finding in node.look()] == expected


@given(st.lists(st.floats(0.0001, 1000), min_size=1, max_size=300))
@example([1.0, 61.0])
def test_nearly_all_steps_keep_to_the_longest_step(seconds: list[float]) -> None:
    histogram = Histogram()
    durations = array("q", [int(each * 1e9) for each in seconds])
    histogram.observe_ns(durations)
    bound = longest_step_seconds(histogram)
    if bound <= HISTOGRAM_BOUNDS_S[-1]:
        assert sum(each / 1e9 <= bound for each in durations) >= 0.999 * len(durations)
        tighter = [each for each in HISTOGRAM_BOUNDS_S if each < bound]
        if tighter:
            assert sum(each / 1e9 <= tighter[-1] for each in durations) < 0.999 * len(durations)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        pytest.param([70.0, 90.0], 120.0, id="all"),
        pytest.param([60.0, 70.0, 90.0], 120.0, id="one within, as long as its bucket"),
        pytest.param([0.4] * 900 + [300.0] * 100, 1.5 * (300 - 0.9), id="most within"),
        pytest.param([0.4] * 900 + [60.5] * 100, 90.0, id="never less than the last bound and a half"),
    ],
)
def test_steps_beyond_the_last_bound_are_told_by_their_own_mean(
    seconds: list[float], expected: float
) -> None:
    histogram = Histogram()
    histogram.observe_ns(array("q", [int(each * 1e9) for each in seconds]))
    assert longest_step_seconds(histogram) == pytest.approx(expected)


def test_of_no_steps_there_is_no_longest() -> None:
    assert longest_step_seconds(Histogram()) == 0.0


def test_the_past_is_bounded_and_ranks_that_leave_are_forgotten() -> None:
    node = Node(rule("stall"))
    node.run(KEPT + 50)
    pace = node.paces.of(node.records[0])
    assert len(pace.looked) == KEPT
    assert pace.usual_step_seconds() == pytest.approx(0.1, rel=0.01)
    node.paces.look(node.records[1:], node.now)
    assert [pace.rank.identity.rank for pace in node.paces.runs()["bert"]] == [1, 2, 3]


def test_every_kind_of_rule_has_its_condition() -> None:
    for when in When:
        made = condition_of(Rule("r", when, above=0.2, below=0.2, metric="torchperfd_clients"))
        node = Node(rule("stall"), ranks=1)
        node.condition = made
        assert node.look() == []
