"""Conditions on a hand-fed store: what fires them, and what must not."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
from prometheus_client.core import GaugeMetricFamily, Metric

from torchperfd_daemon.config.effective import read_plan
from torchperfd_daemon.diagnosis.detect.straggler import Stall
from torchperfd_daemon.diagnosis.verdict import RunFindings
from torchperfd_daemon.store.model import RankIdentity, State, StepColumns
from torchperfd_daemon.store.store import Store
from torchperfd_daemon.triggers.conditions import ConditionInputs, Finding, condition_of
from torchperfd_daemon.triggers.plan import Rule, When

RECENT = 10  # looks that are the present of a GPU's utilisation


def rule(when: str, **more: object) -> Rule:
    return read_plan({}, [{"when": when, **more}], "a test").rules[0]


@dataclass
class WatchedNode:
    """Ranks, what diagnosis has found of them, and the metrics page beside them."""

    rule: Rule
    ranks: int = 4
    world: Store = field(default_factory=Store)
    page: dict[str, list[tuple[dict[str, str], float]]] = field(default_factory=dict)
    found: RunFindings | None = None

    def __post_init__(self) -> None:
        self.now = 1000.0
        self.condition = condition_of(self.rule)
        self.records = [
            self.world.join(RankIdentity("bert", rank, world_size=self.ranks)) for rank in range(self.ranks)
        ]
        self.page["torchperfd_train_rank_info"] = [
            ({"run": "bert", "rank": str(rank), "gpu_uuid": f"GPU-{rank}"}, 1.0) for rank in range(self.ranks)
        ]
        for record in self.records:
            record.state = State.TRAINING

    def evaluate(self, seconds: float = 1.0) -> list[Finding]:
        self.now += seconds
        inputs = ConditionInputs(self.now, {"bert": self.records}, lambda _: self.found, self._metrics)
        return list(self.condition.evaluate(inputs))

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
    def test_slower_run_is_found_with_the_rank_of_its_verdict(self) -> None:
        node = WatchedNode(rule("step-time-regression"))
        node.found = RunFindings(step_seconds=0.13, normal_seconds=0.1, culprit=2)
        found = node.evaluate()
        assert ranks(found) == [(2,)]
        assert found[0].reason == "a step of run bert takes 130 ms, 30% more than before"

    def test_slower_run_without_a_culprit_has_the_most_own_work(self) -> None:
        node = WatchedNode(rule("step-time-regression"))
        for rank, own_ms in enumerate((90, 95, 99, 91)):
            steps = array("q", [own_ms * 1_000_000] * 4)
            node.world.add_steps(node.records[rank], StepColumns(steps, steps, {"forward": steps}))
        node.found = RunFindings(step_seconds=0.13, normal_seconds=0.1)
        assert ranks(node.evaluate()) == [(2,)]

    @pytest.mark.parametrize("step_seconds", [0.1, 0.119, 0.05])
    def test_slowdown_within_the_bound_is_not_found(self, step_seconds: float) -> None:
        node = WatchedNode(rule("step-time-regression"))
        node.found = RunFindings(step_seconds=step_seconds, normal_seconds=0.1)
        assert node.evaluate() == []

    def test_run_that_is_no_slower_is_not_found(self) -> None:
        node = WatchedNode(rule("step-time-regression"))
        assert node.evaluate() == []
        node.found = RunFindings(step_seconds=5.0)
        assert node.evaluate() == []


class TestStraggler:
    def test_each_late_rank_is_found(self) -> None:
        node = WatchedNode(rule("straggler"))
        node.found = RunFindings(late_seconds={2: 0.04, 3: 0.03}, peer_seconds=0.08)
        found = node.evaluate()
        assert ranks(found) == [(2,), (3,)]
        assert found[0].reason == "rank 2 of run bert works 120 ms a step, its peers 80 ms"

    def test_lateness_within_the_bound_is_not_found(self) -> None:
        node = WatchedNode(rule("straggler"))
        node.found = RunFindings(late_seconds={2: 0.015}, peer_seconds=0.08)
        assert node.evaluate() == []

    def test_run_without_stragglers_is_not_found(self) -> None:
        node = WatchedNode(rule("straggler"))
        node.found = RunFindings(peer_seconds=0.08)
        assert node.evaluate() == []


class TestStall:
    def stalled(self, waited_seconds: float) -> RunFindings:
        return RunFindings(stall=Stall(waited_seconds, 24.0, 3.0), stalled_ranks=(1, 2))

    def test_stall_is_found_once_past_its_limit(self) -> None:
        node = WatchedNode(rule("stall"))
        node.found = self.stalled(23.0)
        assert node.evaluate() == []
        node.found = self.stalled(25.0)
        found = node.evaluate()
        assert ranks(found) == [(1, 2)]
        assert found[0].reason == "run bert has made no step for 25 s"

    def test_stall_shorter_than_the_rules_limit_is_not_found(self) -> None:
        node = WatchedNode(rule("stall", **{"for": "60s"}))
        node.found = self.stalled(59.0)
        assert node.evaluate() == []
        node.found = self.stalled(61.0)
        assert ranks(node.evaluate()) == [(1, 2)]

    def test_run_without_a_stall_is_not_found(self) -> None:
        node = WatchedNode(rule("stall"))
        node.found = RunFindings(step_seconds=0.1)
        assert node.evaluate(3600) == []


class TestGpus:
    def test_a_gpu_that_becomes_idle_is_found(self) -> None:
        node = WatchedNode(rule("gpu-utilisation-drop"))
        name = "torchperfd_gpu_utilization_ratio"
        for second in range(60):
            for rank in range(4):
                node.gauge(name, 0.9 - 0.01 * (second % 3), gpu=str(rank), gpu_uuid=f"GPU-{rank}")
            assert node.evaluate() == []
        node.gauge(name, 0.2, gpu="3", gpu_uuid="GPU-3")
        found = [node.evaluate() for _ in range(RECENT)][-1]
        assert ranks(found) == [(3,)]
        assert found[0].reason == "GPU 3 of rank 3, run bert is used 20%, it was 89%"

    def test_gpu_idle_in_validation_or_before_is_not_found(self) -> None:
        """A GPU that idles while its rank validates, or that was idle before, meets no condition."""
        node = WatchedNode(rule("gpu-utilisation-drop"))
        name = "torchperfd_gpu_utilization_ratio"
        for _ in range(60):
            node.gauge(name, 0.9, gpu="0", gpu_uuid="GPU-0")
            node.gauge(name, 0.1, gpu="1", gpu_uuid="GPU-1")
            node.gauge(name, 0.9, gpu="9", gpu_uuid="GPU-unowned")
            node.evaluate()
        node.records[0].state = State.VALIDATING
        for gpu, uuid in (("0", "GPU-0"), ("1", "GPU-1"), ("9", "GPU-unowned")):
            node.gauge(name, 0.0, gpu=gpu, gpu_uuid=uuid)
        assert [node.evaluate() for _ in range(60)] == [[]] * 60

    def test_an_error_of_the_driver_holds_for_a_minute(self) -> None:
        node = WatchedNode(rule("xid"))
        name = "torchperfd_gpu_xid_errors_total"
        node.gauge(name, 1, gpu="1", gpu_uuid="GPU-1", xid="31")
        assert node.evaluate() == []
        node.gauge(name, 1, gpu="1", gpu_uuid="GPU-1", xid="79")
        found = node.evaluate()
        assert ranks(found) == [(1,)]
        assert found[0].reason == "the driver reports XID 79 on GPU GPU-1 of rank 1, run bert"
        assert node.evaluate(59) == found
        assert node.evaluate(2) == []
        node.gauge(name, 2, gpu="1", gpu_uuid="GPU-1", xid="79")
        assert node.evaluate() == found

    def test_an_error_of_a_gpu_without_a_rank_concerns_no_run(self) -> None:
        node = WatchedNode(rule("xid", xids=[13]))
        node.gauge("torchperfd_gpu_xid_errors_total", 1, gpu="7", gpu_uuid="GPU-7", xid="13")
        assert [(finding.run, finding.ranks) for finding in node.evaluate()] == [("", ())]

    def test_a_gpu_that_is_nearly_full_is_found(self) -> None:
        node = WatchedNode(rule("gpu-memory-near-full", above=0.9))
        for rank, used in enumerate((89, 90, 91, 50)):
            node.gauge("torchperfd_gpu_memory_total_bytes", 100.0, gpu=str(rank), gpu_uuid=f"GPU-{rank}")
            node.gauge("torchperfd_gpu_memory_used_bytes", used, gpu=str(rank), gpu_uuid=f"GPU-{rank}")
        found = node.evaluate()
        assert [(finding.ranks, finding.reason) for finding in found] == [
            ((2,), "GPU 2 of rank 2, run bert is 91.0% full")
        ]


class TestMetric:
    def test_a_gauge_beyond_its_bound_is_found(self) -> None:
        name = "torchperfd_train_dataloader_ready_batches"
        node = WatchedNode(rule("metric", metric=name, below=1, labels={"rank": "2"}))
        for rank, ready in enumerate((0, 5, 0, 5)):
            node.gauge(name, ready, run="bert", rank=str(rank))
        found = node.evaluate()
        assert [(finding.run, finding.ranks) for finding in found] == [("bert", (2,))]
        assert found[0].reason == f"{name}{{rank=2, run=bert}} is 0"
        node.gauge(name, 1, run="bert", rank="2")
        assert node.evaluate() == []

    def test_of_a_counter_it_is_the_rate(self) -> None:
        name = "torchperfd_train_gc_seconds_total"
        node = WatchedNode(rule("metric", metric=name, above=0.5))
        counted = 1e6
        for per_second, expected in ((0.2, False), (0.8, True), (0.1, False)):
            for _ in range(20):
                counted += per_second
                node.gauge(name, counted, run="bert", rank="0")
                found = node.evaluate()
            assert bool(found) is expected
        node.gauge(name, 3.0, run="bert", rank="0")
        assert node.evaluate() == []

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
        node = WatchedNode(rule("metric", metric="torchperfd_clients", above=0))
        node.gauge("torchperfd_clients", 1.0, **labels)
        assert [(finding.run, finding.ranks) for finding in node.evaluate()] == expected


def test_every_kind_of_rule_has_its_condition() -> None:
    for when in When:
        made = condition_of(Rule("r", when, above=0.2, below=0.2, metric="torchperfd_clients"))
        node = WatchedNode(rule("stall"), ranks=1)
        node.condition = made
        assert node.evaluate() == []
