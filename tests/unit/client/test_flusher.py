"""The flusher: when it flushes, what it reports, and how long steps take lately."""

import threading
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.client.scripted import Clock
from tests.unit.client.training import calls, loader, tiny_model, train

import torchperfd.link.flusher
from torchperfd.events import codes
from torchperfd.link.outbox import WATCHED_S, FlushState, NextFlush, flush_interval, next_flush
from torchperfd.steps.device_times import DeviceTime
from torchperfd.steps.phases import DATA, TRAIN, VALIDATE, StepBatch
from torchperfd.steps.recorder import Recorder
from torchperfd.steps.step_series import Pace
from torchperfd.v1 import session_pb2


def test_flusher_ring_buffer_half_full_is_woken(client: torchperfd.Client) -> None:
    flusher, buffer = client.parts.flusher, client.parts.instruments.buffer
    assert buffer.on_low == flusher.wake
    flusher.stop(5)
    flusher.flush()
    woken: list[int] = []
    buffer.on_low = lambda: woken.append(len(buffer))
    for _ in range(50_000):
        buffer.mark(codes.ENTER, 14)
        buffer.mark(codes.EXIT)
        if woken:
            break
    assert len(woken) == 1
    assert 50_000 < len(buffer) < 70_000
    flusher.flush()
    assert len(buffer) == 0


def trained_and_unreported(client: torchperfd.Client) -> torch.nn.Module:
    """Train for three steps without the flusher's thread, so that nothing is sent; return the model."""
    client.parts.flusher.stop(5)
    while client.parts.outbox.take(0, 100):
        pass
    model = tiny_model()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), loader(3))
    return model


def test_flush_without_report_sends_no_steps(client: torchperfd.Client) -> None:
    trained_and_unreported(client)
    client.parts.flusher.flush()
    assert calls(client)["steps"] == 3
    assert [message.WhichOneof("body") for message in client.parts.outbox.take(0, 100)] == ["state"]
    client.parts.flusher.flush(report=True)
    steps, account = client.parts.outbox.take(0, 100)
    assert (steps.steps.count, account.account.recorded_steps) == (3, 3)
    client.parts.flusher.flush(report=True)
    assert client.parts.outbox.take(0, 100) == []


def test_flush_reports_threads_of_the_training_thread(client: torchperfd.Client) -> None:
    flusher, outbox, model = client.parts.flusher, client.parts.outbox, tiny_model()
    flusher.stop(5)
    flusher.flush()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), loader(3))
    outbox.take(0, 100)
    flusher.flush(send=True)
    [account] = [each.account for each in outbox.take(0, 100) if each.HasField("account")]
    assert account.threads == torch.get_num_threads()


def test_flush_totals_unpackable_are_counted_as_fault(
    client: torchperfd.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.parts.flusher.stop(5)
    model = tiny_model()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), loader(3))
    with monkeypatch.context() as patch:
        patch.setattr("torchperfd.link.wire.totals_to_message", lambda *_: 1 / 0)
        client.parts.outbox.take(0, 100)
        client.parts.flusher.flush(send=True)
        assert client.parts.instruments.faults.counts() == {"report": 1}
        assert [message.WhichOneof("body") for message in client.parts.outbox.take(0, 100)] == ["state"]
    # What was not reported is reported the next time.
    client.parts.flusher.flush(send=True)
    steps, account = client.parts.outbox.take(0, 100)
    assert (steps.steps.count, account.account.recorded_steps) == (3, 3)


def requested(seconds: int) -> session_pb2.DaemonMessage:
    return session_pb2.DaemonMessage(report_frequently=session_pb2.ReportFrequently(seconds=seconds))


def test_flusher_frequent_reports_end_by_themselves(
    client: torchperfd.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon that was killed cannot end them, and a number of any size is no longer than a minute."""
    flusher, session = client.parts.flusher, client.parts.daemon_session
    flusher.stop(5)
    now = [100.0]
    monkeypatch.setattr(torchperfd.link.flusher, "time", SimpleNamespace(monotonic=lambda: now[0]))
    for seconds, lasts in ((10, 10), (2**32 - 1, 60)):
        session.handle_command(requested(seconds))
        now[0] += lasts - 0.5
        assert flusher.is_watched
        now[0] += 1
        assert not flusher.is_watched


def test_flusher_frequent_reports_end_on_request(client: torchperfd.Client) -> None:
    flusher, session = client.parts.flusher, client.parts.daemon_session
    session.handle_command(requested(10))
    assert flusher.is_watched
    session.handle_command(requested(0))
    assert not flusher.is_watched
    session.handle_command(requested(10))
    session.on_welcome(session_pb2.Welcome())
    assert not flusher.is_watched, "another daemon has not requested them"


def test_flusher_overhead_above_limit_reports_as_usual(client: torchperfd.Client) -> None:
    client.parts.instruments.replay.overhead.allows_extra_flushes = False
    client.parts.flusher.report_frequently(10)
    assert not client.parts.flusher.is_watched


def test_flusher_watched_makes_extra_reports(
    client: torchperfd.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    flusher, made = client.parts.flusher, threading.Event()

    def next_flush(state: FlushState) -> NextFlush:
        return NextFlush(0.001 if state.is_watched else 60.0, is_extra=state.is_watched)

    def flush(**how: bool) -> None:
        if how == {"report": True, "again": True, "extra": True}:
            made.set()

    monkeypatch.setattr(torchperfd.link.flusher, "next_flush", next_flush)
    monkeypatch.setattr(flusher, "flush", flush)
    flusher.wake()  # its present wait is from before
    assert not made.wait(0.05)
    flusher.report_frequently(10)
    assert made.wait(20)


def test_flush_extra_samples_nothing(client: torchperfd.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples cost the training thread by the flush, so a page must not make more of them."""
    client.parts.flusher.stop(5)
    sampled: list[str] = []

    def times() -> list[DeviceTime]:
        sampled.append("device")
        return []

    instruments = client.parts.instruments
    monkeypatch.setattr(instruments.hooks.links.loader_sampler, "arm", lambda: sampled.append("loader"))
    monkeypatch.setattr(instruments.accelerator, "times", times)
    client.parts.flusher.flush(report=True, extra=True)
    assert not sampled
    client.parts.flusher.flush(report=True)
    assert sampled == ["loader", "device"]


def test_flush_extra_reports_steps_without_totals(client: torchperfd.Client) -> None:
    """What a daemon reads of them would double, for a page that shows them every few seconds."""
    model = trained_and_unreported(client)
    client.parts.flusher.flush(report=True, extra=True)
    assert [message.WhichOneof("body") for message in client.parts.outbox.take(0, 100)] == ["steps", "state"]
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), loader(2))
    client.parts.flusher.flush(report=True)
    steps, account = client.parts.outbox.take(0, 100)
    assert (steps.steps.count, account.account.recorded_steps) == (2, 5)


NOW = 1_700_000_001.3

SHORT = FlushState(NOW, steps=10_000, step_seconds=0.001)


@pytest.mark.parametrize(
    ("state", "interval"),
    [
        (FlushState(NOW), 1.0),
        (FlushState(NOW, steps=100_000, step_seconds=0.3), 1.0),
        (FlushState(NOW, steps=10_000, step_seconds=0.005), 1.0),
        (FlushState(NOW, steps=10_000, step_seconds=0.0049), 4.0),
        (FlushState(NOW, steps=10_000, step_seconds=0.0001), 4.0),
        (FlushState(NOW, steps=9_999, step_seconds=0.001), 1.0),
        (FlushState(NOW, steps=10_000, step_seconds=0.001, is_live=True), 1.0),
    ],
)
def test_flush_interval_by_state(state: FlushState, interval: float) -> None:
    assert flush_interval(state) == interval


@pytest.mark.parametrize(
    ("now", "seconds"), [(1_700_000_001.25, 2.75), (1_700_000_000.0, 4.0), (1_700_000_003.5, 0.5)]
)
def test_next_flush_short_steps_is_at_a_multiple_of_4(now: float, seconds: float) -> None:
    assert next_flush(FlushState(now, SHORT.steps, SHORT.step_seconds)) == NextFlush(seconds)


@pytest.mark.parametrize(
    ("now", "step_seconds", "due"),
    [
        (1_700_000_001.25, 0.1, NextFlush(0.25, is_extra=True)),
        (1_700_000_001.75, 0.1, NextFlush(0.25)),
        (1_700_000_002.0, 0.1, NextFlush(0.5, is_extra=True)),
        (1_700_000_001.25, 0.001, NextFlush(0.25, is_extra=True)),
        (1_700_000_001.75, 0.001, NextFlush(0.25, is_extra=True)),
        (1_700_000_003.75, 0.001, NextFlush(0.25)),
    ],
)
def test_next_flush_watched_is_at_half_seconds(now: float, step_seconds: float, due: NextFlush) -> None:
    """Those on the grid of a run without a page stay regular flushes."""
    assert next_flush(FlushState(now, 10_000, step_seconds, is_watched=True)) == due


@given(st.floats(1_700_000_000, 1_800_000_000), st.sampled_from((0.001, 0.1)), st.booleans())
def test_next_flush_is_on_the_grid_of_all_ranks(now: float, step_seconds: float, is_watched: bool) -> None:
    state = FlushState(now, steps=10_000, step_seconds=step_seconds, is_watched=is_watched)
    interval, seconds = WATCHED_S if is_watched else flush_interval(state), next_flush(state).seconds
    assert 0 < seconds <= interval
    due = (now + seconds) / interval
    assert due == pytest.approx(round(due), abs=1e-5, rel=0)


def drained(*steps: tuple[int, int]) -> list[StepBatch]:
    """Steps of a kind and a duration each."""
    clock = Clock()
    recorder = Recorder(clock, capacity=1000)
    recorder.open()
    for number, (kind, ns) in enumerate(steps):
        clock.advance(ns)
        recorder.close(kind, number)
    return recorder.drain()


def test_before_the_first_step_there_is_none() -> None:
    pace = Pace()
    pace.add(drained())
    pace.add(drained((VALIDATE, 5)))
    assert pace.step_ns == 0


def test_it_is_the_mean_of_training_steps() -> None:
    pace = Pace()
    pace.add(drained((TRAIN, 10), (VALIDATE, 1000), (TRAIN, 20)))
    pace.add(drained((TRAIN, 30)))
    assert pace.step_ns == 20


def test_rare_long_steps_do_not_count_but_every_other_one_does() -> None:
    pace = Pace()
    pace.add(drained(*[(TRAIN, 10)] * 9, (TRAIN, 31)))
    assert pace.step_ns == 10
    pace = Pace()
    pace.add(drained(*[(TRAIN, 10), (TRAIN, 24)] * 9))
    assert pace.step_ns == 17


@pytest.mark.parametrize("at_once", [True, False])
def test_the_oldest_are_forgotten(at_once: bool) -> None:
    pace = Pace()
    steps = [*[(TRAIN, 100)] * 500, *[(TRAIN, 50)] * 64]
    for batch in [steps] if at_once else [[step] for step in steps]:
        pace.add(drained(*batch))
    assert pace.step_ns == 50


def test_phases_are_means_over_the_same_steps() -> None:
    clock = Clock()
    recorder = Recorder(clock, capacity=1000)
    pace = Pace()
    recorder.open()
    for number, (data, rest) in enumerate([(0, 10), (4, 6), (8, 2), (900, 100)]):
        if data:
            recorder.enter(DATA)
            clock.advance(data)
            recorder.exit()
        clock.advance(rest)
        recorder.close(TRAIN, number)
        pace.add(recorder.drain())
    assert pace.step_ns == 10
    assert pace.phase_ns()[DATA] == 4
    assert sum(pace.phase_ns().values()) == 10
