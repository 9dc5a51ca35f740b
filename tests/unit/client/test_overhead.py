"""The estimate of our own cost, on a scripted clock: what was put in comes out, and limits are kept."""

import math
import time

import pytest
from tests.unit.client.training import calls, loader, tiny_training, train

import torchperfd
from torchperfd.events import EventBuffer, codes
from torchperfd.steps.overhead import CALIBRATE_EVERY_S, CHECK_EVERY_S, DEGRADATIONS, Overhead, event_seconds


class Training:
    """Steps of a millisecond with events of a given cost, and a flush each second."""

    def __init__(
        self, *, event_us: float = 1.0, events: int = 0, flusher: float = 0.0, limit: float | None = None
    ) -> None:
        self.buffer = EventBuffer(16)
        self.seconds = 0.0
        self.calibrations = 0
        self.event_us = event_us
        self._events = events
        self._flusher = flusher
        self.overhead = Overhead(
            self.buffer,
            limit,
            clock=lambda: self.seconds,
            thread_clock=lambda: 5.0 + self._flusher * self.seconds,
            calibrate=self._calibrate,
        )
        self.overhead.on_flush(0.0)

    def _calibrate(self) -> float:
        self.calibrations += 1
        return self.event_us / 1e6

    def run(self, seconds: int, *, extra: bool = False) -> None:
        for _ in range(seconds):
            self.seconds += 1
            self.overhead.count(1000 * self._events)
            self.overhead.on_flush(self.seconds, extra=extra)


@pytest.mark.parametrize("seconds", [1, 10, 100])
@pytest.mark.parametrize(
    ("events", "flusher", "ratio"), [(0, 0.0, 0.0), (10, 0.0, 0.01), (0, 0.002, 0.002), (20, 0.001, 0.021)]
)
def test_overhead_is_events_and_flusher(seconds: int, events: int, flusher: float, ratio: float) -> None:
    training = Training(events=events, flusher=flusher)
    assert training.overhead.ratio is None
    training.run(seconds)
    assert training.overhead.ratio == pytest.approx(ratio)
    assert training.overhead.degradation_level == 0


def test_overhead_without_steps_is_unknown() -> None:
    training = Training(events=10)
    for _ in range(100):
        training.seconds += 1
        training.overhead.on_flush(0.5)
    assert training.overhead.ratio is None


def test_overhead_follows_what_steps_cost_now() -> None:
    training = Training(events=10)
    training.run(round(CHECK_EVERY_S))
    training.event_us = 3.0
    training.run(round(CALIBRATE_EVERY_S))
    assert training.calibrations == 2
    training.run(2 * round(CHECK_EVERY_S))
    assert training.overhead.ratio == pytest.approx(0.03)


def test_overhead_device_marks_are_sampled() -> None:
    training = Training()
    made: list[int] = []

    def mark() -> int:
        made.append(len(made))
        return made[-1]

    timed = training.overhead.timing(mark)
    assert [timed() for _ in range(100)] == list(range(100))
    training.run(1)
    assert training.overhead.ratio is not None
    assert 0 < training.overhead.ratio < math.inf


def test_overhead_above_limit_gives_up_level_by_level(caplog: pytest.LogCaptureFixture) -> None:
    training = Training(events=50, limit=0.01)
    training.buffer.cuda_event_id = training.overhead.timing(lambda: 1)
    seen = []
    for _ in range(4):
        training.run(round(CHECK_EVERY_S))
        buffer = training.buffer
        seen.append(
            (
                training.overhead.degradation_level,
                buffer.cuda_event_id is None,
                buffer.muted != 0,
                buffer.thread == 0,
            )
        )
    assert seen[0] == (1, True, False, False)
    assert seen[1] == (2, True, True, False)
    assert seen[2] == seen[3] == (3, True, True, True)
    messages = [record.getMessage() for record in caplog.records]
    assert [message.rpartition("gives up ")[2] for message in messages] == list(DEGRADATIONS)
    assert messages[0].startswith("torchperfd takes 5.00 % of training time, above max_overhead (1.00 %)")


def test_overhead_extra_flushes_are_given_up_first(caplog: pytest.LogCaptureFixture) -> None:
    training = Training(flusher=0.02, limit=0.01)
    training.run(round(CHECK_EVERY_S), extra=True)
    assert not training.overhead.allows_extra_flushes
    assert training.overhead.degradation_level == 0
    assert "it gives up frequent reports for the live page" in caplog.text
    training.run(round(CHECK_EVERY_S))
    assert training.overhead.degradation_level == 2


def test_overhead_extra_flushes_within_limit_stay() -> None:
    training = Training(flusher=0.02, limit=0.03)
    training.run(3 * round(CHECK_EVERY_S), extra=True)
    assert training.overhead.allows_extra_flushes


def test_overhead_without_device_times_mutes_phases_first() -> None:
    training = Training(events=50, limit=0.01)
    training.run(round(CHECK_EVERY_S))
    assert training.overhead.degradation_level == 2
    muted = (codes.ZERO, codes.FORWARD, codes.BACKWARD, codes.COLLECTIVE)
    assert training.buffer.muted == sum(1 << code for code in muted)


@pytest.mark.parametrize("limit", [None, 0.01])
def test_overhead_within_limit_gives_up_nothing(limit: float | None) -> None:
    training = Training(events=5, limit=limit)
    training.run(120)
    assert training.overhead.degradation_level == 0
    assert training.buffer.muted == 0


def test_event_seconds_is_plausible() -> None:
    assert 0 <= event_seconds() < 0.01


def test_overhead_real_training_is_reported(client: torchperfd.Client) -> None:
    model, optimizer = tiny_training()
    deadline = time.monotonic() + 120
    while (ratio := client.report().totals.overhead) is None and time.monotonic() < deadline:
        train(model, optimizer, loader(30))
    assert ratio is not None
    assert ratio > 0


def test_dropped_phases_leave_the_steps(client: torchperfd.Client) -> None:
    model, optimizer = tiny_training()
    train(model, optimizer, loader(3))
    client.parts.instruments.buffer.muted = sum(
        1 << code for code in (codes.ZERO, codes.FORWARD, codes.BACKWARD)
    )
    train(model, optimizer, loader(4))
    counted = calls(client)
    assert (counted["steps"], counted["data"], counted["optimizer"]) == (7, 7, 7)
    assert (counted["forward"], counted["backward"], counted["zero_grad"]) == (3, 3, 3)
    assert client.report().totals.train.micro_batches == 7
