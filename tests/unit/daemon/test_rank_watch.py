"""What looks make of a rank's counters, by a second computation; and what its surroundings add."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchperfd_daemon.collectors.base import Family
from torchperfd_daemon.collectors.gpu_base import GpuReading
from torchperfd_daemon.diagnosis import RankEvidence
from torchperfd_daemon.diagnosis.detect import StepTimes
from torchperfd_daemon.observer.rank_watch import LEAST_LOOKS, WINDOW_LOOKS, RankWatch
from torchperfd_daemon.observer.surroundings import GpuState, Surroundings, survey
from torchperfd_daemon.store import (
    GcTotal,
    KindTotal,
    PhaseTotal,
    RankIdentity,
    State,
    StepColumns,
    Store,
    Totals,
)

KEY = ("r", 0)
NOTHING = Surroundings()


class Looked:
    """A rank that is looked at once a second; it starts warm."""

    def __init__(self) -> None:
        self.store = Store(clock=lambda: 0.0)
        self.rank = self.store.join(RankIdentity("r", 0, node="node-a", pid=500))
        self.rank.state = State.TRAINING
        self.watch = RankWatch(self.rank, StepTimes(), -100.0)
        self.now = 0.0
        self.steps = 2
        self.sums: dict[str, int] = {}
        self.gc_ns = 0

    def look(
        self,
        steps: list[dict[str, int]],
        gc_ns: int = 0,
        around: Surroundings = NOTHING,
        gpu: GpuState = GpuState(),  # noqa: B008 - it cannot change
    ) -> None:
        for phases in steps:
            for name, ns in phases.items():
                self.sums[name] = self.sums.get(name, 0) + ns
        self.steps += len(steps)
        self.gc_ns += gc_ns
        durations = array("q", [sum(phases.values()) for phases in steps])
        self.store.add_steps(self.rank, StepColumns(durations[:], durations, {}))
        self.rank.totals = Totals(
            train=KindTotal(
                self.steps,
                sum(self.sums.values()),
                phases={name: PhaseTotal(self.steps, ns) for name, ns in self.sums.items()},
            ),
            gc=(GcTotal(0, self.gc_ns),),
        )
        self.now += 1
        self.watch.look(self.now, self.now, around, gpu, frozenset({500}))

    def evidence(self) -> RankEvidence:
        evidence = self.watch.evidence(-1e9)
        assert evidence is not None
        return evidence


steps = st.dictionaries(st.sampled_from(["data", "forward", "mine"]), st.integers(1, 10**9), min_size=1)


@given(st.lists(st.tuples(st.lists(steps, max_size=4), st.integers(0, 10**9)), max_size=30))
def test_the_means_are_those_of_the_newest_ten_looks_that_had_a_step(
    looks: list[tuple[list[dict[str, int]], int]],
) -> None:
    looked = Looked()
    looked.look([])
    spans: list[tuple[list[dict[str, int]], int]] = []
    waiting = 0
    for made, gc_ns in looks:
        looked.look(made, gc_ns)
        waiting += gc_ns
        if made:
            spans.append((made, waiting))
            waiting = 0
    newest = spans[-WINDOW_LOOKS:]
    evidence = looked.watch.evidence(-1e9)
    if len(newest) < LEAST_LOOKS:
        assert evidence is None
        return
    assert evidence is not None
    all_steps = [phases for made, _ in newest for phases in made]
    count = len(all_steps)
    assert evidence.step_seconds == pytest.approx(sum(sum(each.values()) for each in all_steps) / count / 1e9)
    for name in looked.sums:
        mean = sum(phases.get(name, 0) for phases in all_steps) / count / 1e9
        assert evidence.phase_seconds[name] == pytest.approx(mean, abs=1e-12)
    assert evidence.collected_seconds == pytest.approx(sum(ns for _, ns in newest) / count / 1e9, abs=1e-12)


def test_what_the_kernel_counts_is_spread_over_the_steps() -> None:
    looked = Looked()
    full = [{"data": 10**8, "forward": 4 * 10**8}] * 2
    for second in range(12):
        looked.look(full, around=Surroundings({KEY: 0.3 * second}, {KEY: 0.1 * second}, 0.2 * second))
    evidence = looked.evidence()
    assert evidence.queued_seconds == pytest.approx(0.15)
    assert evidence.throttled_seconds == pytest.approx(0.05)
    assert evidence.disk_seconds == pytest.approx(0.1), "no more than the wait for data"


def test_a_gpu_that_heat_slows_down_and_one_that_is_shared() -> None:
    looked = Looked()
    full = [{"forward": 5 * 10**8}] * 2
    for second in range(12):
        slow = second > 1
        gpu = GpuState(0.5 * second, 1e9 if slow else 2e9, 0.8, frozenset({500, 900}))
        looked.look(full, gpu=gpu)
    evidence = looked.evidence()
    assert evidence.device_throttled == pytest.approx(0.5)
    assert evidence.device_slowdown == pytest.approx(0.5)
    assert evidence.device_busy == 0.8
    late = RankEvidence(0, "node-a", 0.5, device_busy=0.8, late_seconds=0.2)
    assert looked.watch.shared(late).device_shared == pytest.approx(0.5)
    looked.look(full, gpu=GpuState(processes=frozenset({900})))
    assert looked.watch.shared(late).device_shared == 0, "in another namespace all processes look foreign"


def test_the_past_is_what_was_before_a_moment_and_begins_anew_when_it_is_over() -> None:
    looked = Looked()
    for second in range(20):
        looked.look([{"forward": 10**8 * (3 if second >= 10 else 1)}] * 2)
    looked.watch.remember(10.0)
    before = looked.evidence().before
    assert before is not None
    assert before.step_seconds == pytest.approx(0.1)
    assert looked.evidence().step_seconds == pytest.approx(0.3)
    looked.watch.forget(10.0)
    assert looked.evidence().before is None
    assert looked.watch.evidence(since=18.0) is None


def test_a_survey_takes_what_matters_of_all_samples() -> None:
    delay = Family("process_run_delay_seconds", "", "counter", ("run", "rank"))
    delay.add(2.5, *("r", "0"))
    pressure = Family("node_pressure_seconds", "", "counter", ("resource", "kind"))
    pressure.add(7.0, "io", "some")
    pressure.add(3.0, "io", "full")
    gpu = GpuReading("0", "GPU-1", process_bytes={77: 1})
    gpu.put("gpu_throttle_seconds", 4.0, "hw_thermal_slowdown")
    gpu.put("gpu_throttle_seconds", 900.0, "sw_power_cap")
    gpu.put("gpu_clock_hertz", 1e9, "sm")
    found = survey([delay, pressure, Family("other", "", "gauge")], [gpu, GpuReading("1", "")])
    assert found == Surroundings(
        {KEY: 2.5}, {}, 7.0, 0.0, {"GPU-1": GpuState(4.0, 1e9, None, frozenset({77}))}
    )
