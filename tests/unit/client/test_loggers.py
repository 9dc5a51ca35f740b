"""Loggers: what they are sent, when, on which thread, and what becomes of those that misbehave."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import pytest

import torchperfd
from torchperfd.loggers import Logger
from torchperfd.loggers.outputs import Readings, Sender, measures
from torchperfd.model.card import CauseCard, VerdictCard
from torchperfd.model.totals import CudaMemory
from torchperfd.report.rank import RankReport
from torchperfd.safety.logs import Faults
from torchperfd.steps.phases import DATA, FORWARD, PhaseNames
from torchperfd.steps.totals import KindTotals, Totals

MS = 10**6


@dataclass
class RecordingLogger:
    """A logger that keeps its calls."""

    every_seconds: float = 0.02
    every_steps: int = 0
    metrics: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    reports: list[RankReport] = field(default_factory=list)
    threads: set[str] = field(default_factory=set)
    closed: int = 0
    verdicts: list[tuple[int, VerdictCard]] = field(default_factory=list)

    def log_verdict(self, card: VerdictCard, step: int) -> None:
        self.verdicts.append((step, card))

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self.threads.add(threading.current_thread().name)
        self.metrics.append((step, dict(metrics)))

    def log_table(self, report: RankReport) -> None:
        self.threads.add(threading.current_thread().name)
        self.reports.append(report)

    def close(self) -> None:
        self.threads.add(threading.current_thread().name)
        self.closed += 1


def totals(steps: int, *, first_ms: int = 0, validations: int = 0) -> Totals:
    """Return steps of 10 ms and 32 samples, a fifth of it data, after a first one that took longer."""

    def kind(steps: int, extra_ms: int = 0) -> KindTotals:
        made = KindTotals(steps=steps, ns=(10 * steps + extra_ms) * MS, samples=32 * steps)
        made.phases[DATA].calls, made.phases[DATA].ns = steps, 2 * steps * MS
        made.phases[FORWARD].calls, made.phases[FORWARD].ns = steps, (8 * steps + extra_ms) * MS
        return made

    warmup = kind(1, first_ms) if steps else KindTotals()
    return Totals(kind(steps, first_ms), kind(validations), warmup)


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_measures_are_the_means_of_what_came_since() -> None:
    assert measures(totals(11), totals(31, validations=4), PhaseNames()) == pytest.approx(
        {
            "torchperfd/step_ms": 10,
            "torchperfd/samples_per_second": 3200,
            "torchperfd_phases/data_share": 0.2,
            "torchperfd_phases/forward_share": 0.8,
            "torchperfd_validation/step_ms": 10,
            "torchperfd_validation/samples_per_second": 3200,
            "torchperfd_validation/data_share": 0.2,
            "torchperfd_validation/forward_share": 0.8,
        }
    )


def test_measures_beside_the_steps_are_logged_with_them() -> None:
    before, now = totals(11), totals(31)
    now.train.tokens = 20 * 512
    now.flops_per_step, now.peak_flops, now.overhead = 4e12, 1e15, 0.0031
    now.cuda = CudaMemory(1, 2, 3)
    reported, plain = measures(before, now, PhaseNames()), measures(before, totals(31), PhaseNames())
    assert {name: reported[name] for name in reported.keys() - plain.keys()} == pytest.approx(
        {
            "torchperfd/tokens_per_second": 51_200,
            "torchperfd/mfu": 0.4,
            "torchperfd_memory/allocated_bytes": 1,
            "torchperfd_memory/reserved_bytes": 2,
            "torchperfd_memory/peak_bytes": 3,
            "torchperfd/overhead_ratio": 0.0031,
        }
    )
    assert measures(now, now, PhaseNames()) == {}, "and not without them"


def test_measures_goodput_excludes_waits_and_gaps() -> None:
    """Of 400 ms, twenty steps of 10 ms train, a fifth of which waits for data."""
    before, now = totals(11), totals(31)
    before.ended_ns, now.ended_ns = 10**15, 10**15 + 400 * MS
    assert measures(before, now, PhaseNames())["torchperfd/goodput"] == pytest.approx(0.4)
    # After the wall clock was set back there is none.
    now.ended_ns = before.ended_ns + 100 * MS
    assert "torchperfd/goodput" not in measures(before, now, PhaseNames())


def test_measures_leave_out_the_first_step() -> None:
    reported = measures(Totals(), totals(3, first_ms=5000), PhaseNames())
    assert reported["torchperfd/step_ms"] == pytest.approx(10)
    assert measures(Totals(), totals(1, first_ms=5000), PhaseNames()) == {}


def test_measures_without_new_steps_are_none() -> None:
    assert measures(totals(9), totals(9), PhaseNames()) == {}


def test_a_phase_never_makes_a_level_of_its_own() -> None:
    names, now = PhaseNames(), totals(3)
    now.train.phases[names.slot("aug/crop")].calls = 3
    assert "torchperfd_phases/aug_crop_share" in measures(totals(1), now, names)


# The sender, without a client.


class Senders:
    """Makes senders, and ends those that a test leaves behind."""

    def __init__(self) -> None:
        self.now = totals(1)
        self.faults = Faults(limit=3)
        self.made: list[Sender] = []
        self.card: VerdictCard | None = None

    def start(self, logger: Logger, on_first: Callable[[], None] = lambda: None) -> Sender:
        readings = Readings(
            PhaseNames(),
            self.faults,
            lambda: self.now.copy(),
            lambda: self.now.train.steps,
            lambda: self.card,
        )
        sender = Sender(logger, "logger Test", readings, on_first)
        self.made.append(sender)
        sender.start()
        return sender

    def report(self) -> RankReport:
        return RankReport(0, self.now.copy(), PhaseNames())


@pytest.fixture
def senders() -> Iterator[Senders]:
    made = Senders()
    yield made
    for sender in made.made:
        sender.conclude(made.report())
        sender.join(5)


def test_logger_logs_new_steps_then_the_rest_and_the_table(senders: Senders) -> None:
    recording, firsts = RecordingLogger(), list[int]()
    sender = senders.start(recording, lambda: firsts.append(1))
    senders.now = totals(11)
    until(lambda: bool(recording.metrics))
    senders.now = totals(21)
    until(lambda: len(recording.metrics) == 2)
    recording.every_seconds = 60
    report = senders.report()
    sender.conclude(report)
    sender.conclude(report)
    sender.join(5)
    assert [step for step, _ in recording.metrics] == [11, 21]
    assert recording.reports == [report]
    assert (recording.closed, firsts) == (1, [1])
    assert recording.threads == {"torchperfd-logger"}
    assert senders.faults.counts() == {}


def test_steps_after_the_last_log_are_logged_at_the_end(senders: Senders) -> None:
    recording = RecordingLogger(every_seconds=3600)
    sender = senders.start(recording)
    senders.now = totals(5)
    sender.conclude(senders.report())
    sender.join(5)
    assert [step for step, _ in recording.metrics] == [5]


def test_steps_may_say_when(senders: Senders) -> None:
    recording = RecordingLogger(every_seconds=float("inf"), every_steps=10)
    senders.start(recording)
    senders.now = totals(11)
    until(lambda: len(recording.metrics) == 1)
    senders.now = totals(20)
    time.sleep(0.6)
    assert [step for step, _ in recording.metrics] == [11]
    senders.now = totals(21)
    until(lambda: len(recording.metrics) == 2)


def card_on(rank: int | None, cost: float) -> VerdictCard:
    where = "" if rank is None else f"rank {rank} on node-a"
    return VerdictCard("r", (CauseCard("slow rank", where, "words", "", cost, 0.1, 0.0, 0.0, rank),))


def test_logger_gets_the_verdict_when_its_cause_or_rank_changes(senders: Senders) -> None:
    recording = RecordingLogger()
    senders.start(recording)
    cards = [None, card_on(None, 0.02), card_on(None, 0.03), card_on(3, 0.02)]
    for number, card in enumerate(cards, start=1):
        senders.card = card
        senders.now = totals(1 + 10 * number)
        until(lambda: len(recording.metrics) == number)  # noqa: B023 - called at once
    until(lambda: len(recording.verdicts) == 2)
    assert recording.verdicts == [(21, cards[1]), (41, cards[3])]
    assert [metrics.get("torchperfd/slow_rank") for _, metrics in recording.metrics] == [None, None, None, 3]


class WithoutVerdicts:
    """A logger as they were before there were verdicts."""

    every_seconds = 0.02

    def __init__(self) -> None:
        self.steps: list[int] = []

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self.steps.append(step)

    def log_table(self, report: RankReport) -> None:
        pass

    def close(self) -> None:
        pass


def test_logger_without_the_method_gets_no_verdict(senders: Senders) -> None:
    plain = WithoutVerdicts()
    senders.card = card_on(3, 0.02)
    senders.start(plain)
    senders.now = totals(11)
    until(lambda: plain.steps == [11])
    senders.made[0].conclude(senders.report())
    senders.made[0].join(5)
    assert senders.faults.counts() == {}


class Broken(RecordingLogger):
    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        super().log_metrics(metrics, step)
        raise OSError("disk full")


def test_raising_logger_is_counted_and_dropped_past_the_limit(senders: Senders) -> None:
    broken = Broken()
    sender = senders.start(broken)
    for steps in range(2, 100):
        senders.now = totals(steps)
        if broken.closed:
            break
        time.sleep(0.05)
    assert len(broken.metrics) == 3
    sender.conclude(senders.report())
    sender.join(5)
    assert (broken.reports, broken.closed) == ([], 1)
    assert senders.faults.counts() == {"logger Test": 3}


class Missing(RecordingLogger):
    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        super().log_metrics(metrics, step)
        raise ImportError("No module named 'wandb'; pip install wandb")


def test_logger_without_its_library_is_tried_once(senders: Senders, caplog: pytest.LogCaptureFixture) -> None:
    missing = Missing()
    senders.start(missing)
    senders.now = totals(3)
    until(lambda: bool(missing.closed))
    assert len(missing.metrics) == 1
    assert "pip install wandb" in caplog.text


class Hanging(RecordingLogger):
    release: threading.Event

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        super().log_metrics(metrics, step)
        self.release.wait(20)


# With a client.


def test_a_client_sends_from_threads_of_their_own() -> None:
    recording, other = RecordingLogger(), RecordingLogger()
    client = torchperfd.attach(loggers=[recording])
    client.add_logger(other)
    for _ in range(3):
        client.step(samples=8)
    client.detach()
    for each in (recording, other):
        assert each.threads == {"torchperfd-logger"}
        assert sum(metrics["torchperfd/samples_per_second"] > 0 for _, metrics in each.metrics) >= 1
        assert [report.table.steps for report in each.reports] == [3]
        assert each.closed == 1
    assert [sender.place for sender in client.parts.outputs.senders] == [
        "logger RecordingLogger",
        "logger RecordingLogger 2",
    ]
    assert not [thread for thread in threading.enumerate() if thread.name == "torchperfd-logger"]


def test_a_detached_client_takes_no_logger() -> None:
    client = torchperfd.attach()
    client.detach()
    client.add_logger(RecordingLogger())
    assert client.parts.outputs.senders == []


def test_something_that_is_no_logger_costs_training_nothing() -> None:
    client = torchperfd.attach(loggers=[object()])  # type: ignore[list-item]
    for _ in range(3):
        client.step()
    client.detach()
    assert client.parts.instruments.faults.counts()["logger object"] >= 1


def test_detach_with_a_hanging_logger_waits_a_second_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    join = Sender.join

    def observed_join(sender: Sender, timeout: float) -> None:
        waits.append(timeout)
        join(sender, timeout)

    monkeypatch.setattr(Sender, "join", observed_join)
    hanging, recording = Hanging(), RecordingLogger()
    hanging.release = threading.Event()
    client = torchperfd.attach(loggers=[hanging, recording])
    for _ in range(3):
        client.step()
    until(lambda: bool(hanging.metrics))
    client.step()
    assert client.report().table.steps == 4
    client.detach()
    assert len(waits) == 2
    assert max(waits) <= 1.0
    assert [thread for thread in threading.enumerate() if thread.name == "torchperfd-logger"]
    assert recording.closed == 1
    assert client.parts.instruments.faults.counts() == {"logger Hanging": 1}
    hanging.release.set()
    until(lambda: not [t for t in threading.enumerate() if t.name == "torchperfd-logger"])
