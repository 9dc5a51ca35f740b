"""The evidence from samples of a rank's counters, by a second computation, and from the node's context."""

from array import array
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.values import some

from torchperfd.model.source_lines import SyncWait
from torchperfd.model.totals import GcTotals, PhaseTotals
from torchperfd_daemon.collectors.base import Family
from torchperfd_daemon.collectors.gpu_readings import GpuReading
from torchperfd_daemon.diagnosis.detect.straggler import StepTimes
from torchperfd_daemon.diagnosis.evidence import MIN_WINDOW_SAMPLES, WINDOW_SAMPLES, RankEvidence
from torchperfd_daemon.observer.node_context import GpuState, NodeContext, Storage, survey
from torchperfd_daemon.observer.rank_watch import RankWatch
from torchperfd_daemon.store.model import KindTotal, RankIdentity, State, StepColumns, Totals
from torchperfd_daemon.store.store import Store

KEY = ("r", 0)
NOTHING = NodeContext()


class Looked:
    """A rank that is sampled at once a second; it starts warm."""

    def __init__(self) -> None:
        self.store = Store(clock=lambda: 0.0)
        self.rank = self.store.join(RankIdentity("r", 0, node="node-a", pid=500))
        self.rank.state = State.TRAINING
        self.watch = RankWatch(self.rank, StepTimes(), -100.0)
        self.now = 0.0
        self.steps = 2
        self.sums: dict[str, int] = {}
        self.device_sums: dict[str, int] = {}
        self.gc_ns = 0

    def sample(
        self,
        steps: list[dict[str, int]],
        gc_ns: int = 0,
        around: NodeContext = NOTHING,
        gpu: GpuState = GpuState(),  # noqa: B008 - it cannot change
        checkpoint: PhaseTotals | None = None,
        compiled: PhaseTotals | None = None,
        late: float | None = None,
        sync_waits: tuple[SyncWait, ...] = (),
    ) -> None:
        """Add steps, and sample; the last step ended ``late`` seconds before, if that is known."""
        for phases in steps:
            for name, ns in phases.items():
                self.sums[name] = self.sums.get(name, 0) + ns
        self.steps += len(steps)
        self.gc_ns += gc_ns
        durations = array("q", [sum(phases.values()) for phases in steps])
        ends = array("q", [round((self.now + 1 - late) * 1e9)] * len(steps)) if late else durations[:]
        self.store.add_steps(self.rank, StepColumns(ends, durations, {}))
        self.rank.totals = Totals(
            train=KindTotal(
                self.steps,
                sum(self.sums.values()),
                phases={
                    name: PhaseTotals(self.steps, ns, device_ns=self.device_sums.get(name, 0))
                    for name, ns in self.sums.items()
                },
            ),
            gc=(GcTotals(0, self.gc_ns),),
            checkpoint=checkpoint,
            compiled=compiled or PhaseTotals(),
            sync_waits=sync_waits,
        )
        self.now += 1
        self.watch.sample(self.now, self.now, around, gpu, frozenset({500}))

    def evidence(self) -> RankEvidence:
        return some(self.watch.evidence(-1e9))


steps = st.dictionaries(st.sampled_from(["data", "forward", "mine"]), st.integers(1, 10**9), min_size=1)


@given(st.lists(st.tuples(st.lists(steps, max_size=4), st.integers(0, 10**9)), max_size=30))
def test_means_are_of_the_newest_ten_samples_with_a_step(
    samples: list[tuple[list[dict[str, int]], int]],
) -> None:
    sampled = Looked()
    sampled.sample([])
    spans: list[tuple[list[dict[str, int]], int]] = []
    waiting = 0
    for made, gc_ns in samples:
        sampled.sample(made, gc_ns)
        waiting += gc_ns
        if made:
            spans.append((made, waiting))
            waiting = 0
    newest = spans[-WINDOW_SAMPLES:]
    evidence = sampled.watch.evidence(-1e9)
    if len(newest) < MIN_WINDOW_SAMPLES:
        assert evidence is None
        return
    assert evidence is not None
    all_steps = [phases for made, _ in newest for phases in made]
    count = len(all_steps)
    assert evidence.step_seconds == pytest.approx(sum(sum(each.values()) for each in all_steps) / count / 1e9)
    for name in sampled.sums:
        mean = sum(phases.get(name, 0) for phases in all_steps) / count / 1e9
        assert evidence.phase_seconds[name] == pytest.approx(mean, abs=1e-12)
    assert evidence.collected_seconds == pytest.approx(sum(ns for _, ns in newest) / count / 1e9, abs=1e-12)


def test_waits_of_the_host_are_those_of_the_newest_samples() -> None:
    sampled = Looked()
    waited = {"a.py": 10**12, "/home/b.py": 0}
    for second in range(30):
        waited["/home/b.py" if second >= 15 else "a.py"] += 2 * 10**7
        waits = tuple(SyncWait(file, 7, "item", ns) for file, ns in waited.items())
        busy = GpuState(utilization=0.9 if second < 15 else 0.6)
        sampled.sample([{"forward": 5 * 10**8}] * 2, gpu=busy, sync_waits=waits)
    evidence = sampled.evidence()
    assert evidence.sync_seconds == pytest.approx(0.01)
    assert evidence.sync_line == "item() at b.py:7"
    assert evidence.device_busy == pytest.approx(0.6)


def test_without_waits_of_the_host_there_is_no_line() -> None:
    sampled = Looked()
    for _ in range(5):
        sampled.sample([{"forward": 10**9}])
    evidence = sampled.evidence()
    assert (evidence.sync_seconds, evidence.sync_line, evidence.device_busy) == (0.0, "", None)


def test_phases_on_the_device_share_the_step_as_its_times_do() -> None:
    """Of a few steps, and a report later: only what part of the device's time each phase has counts."""
    sampled = Looked()
    full = [{"data": 10**8, "forward": 3 * 10**8, "collective_wait": 10**8}] * 2
    sampled.sample(full)
    assert sampled.watch.evidence(-1e9) is None
    for second in range(16):
        if second:
            times = {"data": 10, "forward": 20 * (2 if second > 12 else 1), "collective_wait": 10}
            for name, ns in times.items():
                sampled.device_sums[name] = sampled.device_sums.get(name, 0) + ns
        sampled.sample(full)
    evidence = sampled.evidence()
    parts = {"data": 10 * 10, "forward": 20 * 7 + 40 * 3, "collective_wait": 10 * 10}
    assert evidence.device_phase_seconds == pytest.approx(
        {name: 0.5 * part / sum(parts.values()) for name, part in parts.items()}
    )
    assert evidence.wait_seconds == evidence.device_phase_seconds["collective_wait"]
    assert evidence.own_seconds == pytest.approx(0.5 * 360 / 460)
    # Of each sample that has any times; the first had none.
    work = sampled.watch.device_work({"data": 0.025})
    assert work.phase_seconds["data"] == pytest.approx([0.1] * 12 + [1 / 12 - 0.025] * 3, abs=1e-9)
    assert [len(column) for column in work.phase_seconds.values()] == [15] * 3


def test_without_device_times_there_are_none() -> None:
    sampled = Looked()
    for _ in range(12):
        sampled.sample([{"forward": 10**8}])
    assert sampled.evidence().device_phase_seconds == {}


def test_what_the_kernel_counts_is_spread_over_the_steps() -> None:
    sampled = Looked()
    full = [{"data": 10**8, "forward": 4 * 10**8}] * 2
    for second in range(12):
        around = NodeContext(
            {KEY: 0.3 * second},
            {KEY: 0.4 * second},
            {KEY: 0.1 * second},
            storage=Storage(seconds={KEY: 0.2 * second}),
            memory_seconds=0.1 * second,
        )
        sampled.sample(full, around=around)
    evidence = sampled.evidence()
    assert evidence.queued_seconds == pytest.approx(0.15)
    assert evidence.exchange_queued_seconds == pytest.approx(0.2)
    assert evidence.throttled_seconds == pytest.approx(0.05)
    assert evidence.disk_seconds == pytest.approx(0.1), "no more than the wait for data"
    assert evidence.reclaim_seconds == pytest.approx(0.05)


def test_a_gpu_that_heat_slows_down_and_one_that_is_shared() -> None:
    sampled = Looked()
    full = [{"forward": 5 * 10**8}] * 2
    for second in range(12):
        slow = second > 1
        gpu = GpuState(0.5 * second, 1e9 if slow else 2e9, 0.8, frozenset({500, 900}))
        sampled.sample(full, gpu=gpu)
    evidence = sampled.evidence()
    assert evidence.device_throttled == pytest.approx(0.5)
    assert evidence.device_slowdown == pytest.approx(0.5)
    assert evidence.device_busy == pytest.approx(0.8)
    late = RankEvidence(0, "node-a", 0.5, device_busy=0.8, late_seconds=0.2)
    assert sampled.watch.with_sharing(late).device_shared == pytest.approx(0.5)
    sampled.sample(full, gpu=GpuState(processes=frozenset({900})))
    assert sampled.watch.with_sharing(late).device_shared == 0, (
        "in another namespace all processes look foreign"
    )


def test_past_is_before_the_onset_and_restarts_after_it() -> None:
    sampled = Looked()
    for second in range(20):
        sampled.sample([{"forward": 10**8 * (3 if second >= 10 else 1)}] * 2)
    sampled.watch.remember(10.0)
    assert some(sampled.evidence().before).step_seconds == pytest.approx(0.1)
    assert sampled.evidence().step_seconds == pytest.approx(0.3)
    sampled.watch.forget(10.0)
    assert sampled.evidence().before is None
    assert sampled.watch.evidence(since=18.0) is None


def test_steps_reported_late_belong_to_their_own_time() -> None:
    sampled = Looked()
    quick, slow = {"forward": 10**8}, {"forward": 3 * 10**8}
    for _ in range(8):
        sampled.sample([quick] * 10, late=0.9)
    # Of the steps until 8.1 s, reported at 9 s, those since 7.5 s are slow.
    sampled.sample([quick] * 4 + [slow] * 2, late=0.9)
    sampled.sample([slow] * 3, late=0.9)
    assert sampled.watch.evidence(since=7.5) is None, "there are too few samples"
    sampled.sample([slow] * 3, late=0.9)
    assert some(sampled.watch.evidence(since=7.5)).step_seconds == pytest.approx(0.3)
    sampled.watch.forget(7.5)
    sampled.watch.remember(sampled.now)
    assert some(sampled.evidence().before).step_seconds == pytest.approx(0.3)


@pytest.mark.parametrize("late", [-30.0, 30.0])
def test_steps_with_a_wrong_clock_are_dated_by_their_sample(late: float) -> None:
    sampled = Looked()
    for second in range(9):
        sampled.sample([{"forward": 10**8 * (3 if second >= 5 else 1)}] * 2, late=late)
    assert some(sampled.watch.evidence(since=5.0)).step_seconds == pytest.approx(0.3)


def test_slowdown_dated_late_is_no_part_of_the_past() -> None:
    sampled = Looked()
    for second in range(16):
        # From the eighth second on every tenth step takes five times as long.
        sampled.sample([{"forward": 10**8}] * 9 + [{"forward": 10**8 * (5 if second >= 8 else 1)}])
    sampled.watch.remember(12.0)
    assert some(sampled.evidence().before).step_seconds == pytest.approx(0.1, rel=0.03)


def test_a_survey_takes_what_matters_of_all_samples() -> None:
    delay = Family("process_run_delay_seconds", "", "counter", ("run", "rank"))
    delay.add(2.5, *("r", "0"))
    exchange = Family("process_collective_run_delay_seconds", "", "counter", ("run", "rank"))
    exchange.add(1.25, *("r", "0"))
    pressure = Family("node_pressure_seconds", "", "counter", ("resource", "kind"))
    pressure.add(7.0, "io", "some")
    pressure.add(3.0, "io", "full")
    gpu = GpuReading("0", "GPU-1", process_bytes={77: 1})
    gpu.put("gpu_throttle_seconds", 4.0, "hw_thermal_slowdown")
    gpu.put("gpu_throttle_seconds", 900.0, "sw_power_cap")
    gpu.put("gpu_clock_hertz", 1e9, "sm")
    found = survey([delay, exchange, pressure, Family("other", "", "gauge")], [gpu, GpuReading("1", "")])
    assert found == NodeContext(
        {KEY: 2.5}, {KEY: 1.25}, {}, Storage(7.0), gpus={"GPU-1": GpuState(4.0, 1e9, None, frozenset({77}))}
    )


def storage(pressed: float, busy: float, moved: int, **read: int) -> list[Family]:
    """Return the collectors' values of storage: seconds, and bytes by rank (``rank0=``)."""
    pressure = Family("node_pressure_seconds", "", "counter", ("resource", "kind"))
    pressure.add(pressed, "io", "some")
    at_it = Family("node_disk_busy_seconds", "", "counter")
    at_it.add(busy)
    traffic = Family("node_disk_bytes", "", "counter", ("direction",))
    traffic.add(moved // 2, "read")
    traffic.add(moved - moved // 2, "write")
    ranks = Family("process_io_bytes", "", "counter", ("run", "rank", "direction"))
    for name, count in read.items():
        ranks.add(count, "r", name.removeprefix("rank"), "read")
        ranks.add(10**9, "r", name.removeprefix("rank"), "write")
    return [pressure, at_it, traffic, ranks]


def test_rank_disk_share_is_the_larger_of_bytes_and_pressure() -> None:
    """A rank has its part of the disk's time by bytes, or the node's pressure if that is more."""
    first = survey(storage(5.0, 10.0, 1000, rank0=0, rank1=0), []).storage
    assert first.seconds == {("r", 0): 0.0, ("r", 1): 0.0}
    second = survey(storage(5.1, 10.8, 2000, rank0=750, rank1=0), [], first).storage
    assert second.seconds == pytest.approx({("r", 0): 0.6, ("r", 1): 0.1})
    # More than the disk has moved so far: never more than all of its time.
    third = survey(storage(5.1, 11.8, 2100, rank0=9750, rank1=0, rank2=77), [], second).storage
    assert third.seconds == pytest.approx({("r", 0): 1.6, ("r", 1): 0.1, ("r", 2): 0.0})


class Saving(Looked):
    """A rank that makes ten steps of 50 ms per sample, and a checkpoint at a fixed number of steps."""

    def __init__(self, every: int, ns_of: Callable[[int], int]) -> None:
        super().__init__()
        self._every, self._ns_of = every, ns_of
        self._made = self._saved_ns = 0

    def second(self) -> None:
        for _ in range(10):
            self._made += 1
            if self._made % self._every == 0:
                self._saved_ns += self._ns_of(self._made)
        self.sample(
            [{"forward": 5 * 10**7}] * 10,
            checkpoint=PhaseTotals(self._made // self._every, self._saved_ns),
        )


@given(every=st.integers(1, 50), onset=st.integers(200, 300))
def test_slower_checkpoints_cost_their_current_time(every: int, onset: int) -> None:
    # No onset was reported: long steps among short ones are no shift.
    sampled = Saving(every, lambda step: 10**8 if step > onset else 10**6)
    for _ in range(onset // 10 + 30):
        sampled.second()
    assert sampled.evidence().checkpoint_seconds == pytest.approx(0.1 / every, rel=every / 300)


def test_rare_checkpoints_cost_their_time_in_the_regime() -> None:
    sampled = Saving(250, lambda _: 10**9)
    for _ in range(126):
        sampled.second()
    assert sampled.evidence().checkpoint_seconds == pytest.approx(1 / 250, rel=0.1)


def test_the_past_has_its_own_checkpoints() -> None:
    sampled = Saving(10, lambda step: 10**8 if step > 100 else 10**7)
    for second in range(20):
        sampled.second()
        if second == 11:
            sampled.watch.remember(10.0)
    evidence = sampled.evidence()
    assert some(evidence.before).checkpoint_seconds == pytest.approx(0.001)
    assert evidence.checkpoint_seconds == pytest.approx(0.01)


def test_compilations_are_spread_over_the_steps_of_the_window() -> None:
    sampled = Looked()
    for second in range(12):
        sampled.sample([{"forward": 10**8}] * 4, compiled=PhaseTotals(second, second * 2 * 10**7))
    assert sampled.evidence().compiled_seconds == pytest.approx(0.005)


def grown(pace: float, seconds: int, wobble: float = 0.0) -> RankEvidence:
    """Return the evidence of a rank of a gigabyte that has begun to grow, with four gigabytes of room."""
    sampled = Looked()
    for second in range(10 + seconds):
        bytes_held = 1e9 + pace * max(0, second - 10) + wobble * (second % 2)
        sampled.sample(
            [{"forward": 10**8}] * 4, around=NodeContext(resident={KEY: bytes_held}, available_bytes=4e9)
        )
    return sampled.evidence()


def test_fast_memory_growth_is_seen_within_ten_samples() -> None:
    evidence = grown(pace=5e7, seconds=12)
    assert evidence.grows_by == pytest.approx(5e7)
    assert evidence.grows_for_seconds == pytest.approx(9)
    assert evidence.full_in_seconds == pytest.approx(80)


@pytest.mark.parametrize(("pace", "wobble"), [(5e5, 0.0), (0.0, 5e7), (2e6, 5e7)])
def test_memory_that_hardly_grows_or_only_wobbles_does_not_grow(pace: float, wobble: float) -> None:
    evidence = grown(pace, seconds=12, wobble=wobble)
    assert (evidence.grows_by, evidence.full_in_seconds) == (0.0, None)
