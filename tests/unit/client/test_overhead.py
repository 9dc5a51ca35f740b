"""Our own cost, measured on a scripted tape and clock: what was put in comes out, and limits are kept."""

import itertools
import random
import statistics
import time
from collections.abc import Callable
from struct import pack

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.client.training import calls, loader, tiny_model, train

import torchperfd
from torchperfd.campaign import median_and_error
from torchperfd.overhead import SHED, Overhead
from torchperfd.tape import Tape
from torchperfd.tape import events as on_tape

SGD, ADAM = 42, 43


class Training:
    """Plays steps of a given length, longer while they are doubled, and lets the pump turn.

    A step beginning at a second for which ``busy`` holds takes twice as long. The pump takes a part of the
    time, and a tenth more while a campaign is on, in which it turns more often.
    """

    def __init__(
        self,
        step_ns: int,
        cost_ns: int,
        limit: float | None = None,
        pump: float = 0.0,
        busy: Callable[[float], bool] = lambda _: False,
    ) -> None:
        self.tape = Tape(16)
        self.now_ns = 10**9
        self._flushered_ns = 0.0
        self._flusher = pump
        self._busy = busy
        self.overhead = Overhead(
            self.tape,
            limit,
            clock=lambda: self.now_ns / 1e9,
            pump_clock=lambda: self._flushered_ns / 1e9,
        )
        self._step_ns = step_ns
        self._cost_ns = cost_ns
        self._random = random.Random(0)

    def run(self, seconds: float, noise: float = 0.0) -> None:
        until, turn = self.now_ns + round(seconds * 1e9), self.now_ns
        while self.now_ns < until:
            if self.tape.doubled:
                self._happens(on_tape.SHADOW, times=10)
            began = self.now_ns
            busy = 2 if self._busy(began / 1e9) else 1
            self.now_ns += round(busy * self._step_ns * (1 + noise * self._random.random()))
            self.now_ns += self._cost_ns * self.tape.doubled
            self._flushered_ns += (self._flusher + 0.1 * self.overhead.measuring) * (self.now_ns - began)
            self._happens(on_tape.OPTIMIZER)
            self._happens(on_tape.OPTIMIZER, optimizer=ADAM)  # of another model, in the same steps
            while turn <= self.now_ns:
                self.overhead.turn(self._step_ns / 1e9)
                turn += 250_000_000

    def _happens(self, code: int, *, optimizer: int = SGD, times: int = 1) -> None:
        word = optimizer << on_tape.ARGUMENT_SHIFT | code
        self.overhead.read(pack(on_tape.EVENT_FORMAT, self.now_ns, word) * times)


@pytest.mark.parametrize("step_ns", [1_000_000, 30_000_000, 400_000_000])
@pytest.mark.parametrize("part", [0.0, 0.004, 0.05])
def test_what_it_costs_is_what_it_tells(step_ns: int, part: float) -> None:
    training = Training(step_ns, round(part * step_ns))
    assert training.overhead.ratio is None
    training.run(60)
    assert training.overhead.ratio == pytest.approx(part, abs=1e-6)
    assert training.overhead.shed == 0


def test_the_median_of_campaigns_stands_noise() -> None:
    training = Training(2_000_000, 20_000)
    training.run(600, noise=0.05)
    assert training.overhead.ratio == pytest.approx(0.01, abs=0.003)


@settings(max_examples=30)
@given(start=st.floats(0.5, 4), seconds=st.floats(0.1, 3))
def test_what_else_slows_steps_for_a_while_is_no_cost(start: float, seconds: float) -> None:
    """Like a program that starts, or a capture, in the first campaign, which is the only one for minutes."""
    training = Training(4_000_000, 40_000, busy=lambda second: start <= second < start + seconds)
    training.run(10)
    # Of a step that takes twice as long, half as much.
    assert training.overhead.ratio is not None
    assert 0.0049 <= training.overhead.ratio <= 0.0101


def test_a_campaign_that_cannot_tell_goes_on_for_twice_as_long_and_then_tells_nothing() -> None:
    def seconds_measured(noise: float) -> tuple[float, float | None]:
        training = Training(40_000_000, 0)
        measured = 0.0
        for _ in range(200):
            training.run(0.1, noise)
            measured += 0.1 * training.overhead.measuring
        return measured, training.overhead.ratio

    quiet, ratio = seconds_measured(0.01)
    assert ratio == pytest.approx(0.0, abs=0.005)
    loud, ratio = seconds_measured(2.0)
    assert ratio is None
    assert loud == pytest.approx(2 * quiet, rel=0.2)


def test_campaigns_that_cannot_tell_do_so_together() -> None:
    training = Training(40_000_000, 2_000_000)
    ratios = []
    for _ in range(20):
        training.run(30, noise=0.15)
        ratios.append(training.overhead.ratio)
    assert ratios[0] is None
    assert ratios[-1] is not None
    # Of a mean step: half the noise is in all of them.
    assert ratios[-1] == pytest.approx(0.05 / 1.075, abs=0.01)


def test_what_the_pump_takes_counts_as_between_campaigns() -> None:
    training = Training(1_000_000, 4_000, pump=0.01)
    training.run(30)
    assert training.overhead.ratio == pytest.approx(0.014, abs=1e-4)


def test_the_error_of_a_median_is_what_medians_scatter_by() -> None:
    chance = random.Random(1)
    found = [median_and_error([chance.gauss(0.3, 0.02) for _ in range(64)]) for _ in range(2000)]
    medians, errors = zip(*found, strict=True)
    assert statistics.fmean(medians) == pytest.approx(0.3, abs=0.001)
    # Half of them count, as each block is in two differences.
    assert statistics.median(errors) == pytest.approx(2**0.5 * statistics.stdev(medians), rel=0.15)


def test_most_steps_are_not_doubled() -> None:
    training = Training(1_000_000, 0)
    doubled = 0
    for _ in range(120_000):
        training.run(0.001)
        doubled += training.tape.doubled
    assert 0 < doubled < 0.05 * 120_000


@pytest.mark.parametrize(
    ("step_ns", "limit", "every_seconds"),
    [(1_000_000, None, 600), (1_000_000, 0.5, 30), (30_000_000, None, 30)],
)
def test_it_measures_rarely_beside_short_steps_unless_there_is_a_limit_to_keep(
    step_ns: int, limit: float | None, every_seconds: int
) -> None:
    training = Training(step_ns, 0, limit)
    begun = []
    for second in range(2000):
        before = training.overhead.measuring
        training.run(1)
        if training.overhead.measuring and not before:
            begun.append(second)
    # To this comes the campaign itself, of two seconds.
    apart = [later - earlier for earlier, later in itertools.pairwise(begun)]
    assert len(apart) >= 2
    assert all(every_seconds <= seconds <= every_seconds + 5 for seconds in apart)


def test_past_the_limit_detail_is_shed_tier_by_tier(caplog: pytest.LogCaptureFixture) -> None:
    training = Training(1_000_000, 50_000, limit=0.01)
    training.tape.ticket = lambda: 1
    seen = []
    for _ in range(4):
        training.run(30)
        seen.append(
            (
                training.overhead.shed,
                training.tape.ticket is None,
                training.tape.muted != 0,
                training.tape.thread == 0,
            )
        )
    assert seen[0] == (1, True, False, False)
    assert seen[1] == (2, True, True, False)
    assert seen[2] == seen[3] == (3, True, True, True)
    messages = [record.getMessage() for record in caplog.records]
    assert [message.rpartition("gives up ")[2] for message in messages] == list(SHED)
    assert messages[0].startswith("torchperfd takes 5.00 % of training time, more than the 1.00 % allowed")


def test_where_there_are_no_device_times_the_next_tier_is_the_first() -> None:
    training = Training(1_000_000, 50_000, limit=0.01)
    training.run(20)
    assert training.overhead.shed == 2
    muted = (on_tape.ZERO, on_tape.FORWARD, on_tape.BACKWARD, on_tape.COLLECTIVE)
    assert training.tape.muted == sum(1 << code for code in muted)


def test_below_the_limit_nothing_is_shed() -> None:
    training = Training(1_000_000, 5_000, limit=0.01)
    training.run(120)
    assert training.overhead.shed == 0
    assert training.tape.muted == 0


def test_in_noise_nothing_is_shed() -> None:
    training = Training(1_000_000, 0, limit=0.001)
    training.run(300, noise=2.0)
    assert training.overhead.shed == 0


def test_without_steps_nothing_is_measured_and_after_the_end_nothing_is_doubled() -> None:
    training = Training(1_000_000, 0)
    training.overhead.turn(0.0)
    assert not training.tape.doubled
    training.overhead.turn(0.001)
    assert training.tape.doubled
    training.overhead.stop()
    assert not training.tape.doubled
    training.run(60)
    assert training.overhead.ratio is None


def test_a_real_training_is_measured_and_counted_the_same(
    client: torchperfd.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All events of the doubled steps are there once."""
    monkeypatch.setattr("torchperfd.overhead.RESOLUTION", 5.0)  # however noisy this machine is
    client._flusher.stop(5)
    overhead = client._replay.overhead
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = 0
    deadline = time.monotonic() + 60
    while overhead.ratio is None and time.monotonic() < deadline:
        train(model, optimizer, loader(3))
        steps += 3
        client.report()
        overhead.turn(client._flusher.account.train.mean_seconds)
    assert overhead.ratio is not None
    assert 0 <= overhead.ratio < 5
    assert client.report().account.overhead == overhead.ratio
    counted = calls(client)
    assert counted["steps"] == counted["backward"] == counted["optimizer"] == counted["data"] == steps


def test_shed_phases_leave_the_steps(client: torchperfd.Client) -> None:
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, loader(3))
    client._tape.muted = sum(1 << code for code in (on_tape.ZERO, on_tape.FORWARD, on_tape.BACKWARD))
    train(model, optimizer, loader(4))
    counted = calls(client)
    assert (counted["steps"], counted["data"], counted["optimizer"]) == (7, 7, 7)
    assert (counted["forward"], counted["backward"], counted["zero_grad"]) == (3, 3, 3)
    assert train_micro_batches(client) == 7


def train_micro_batches(client: torchperfd.Client) -> int:
    return client.report().account.train.micro_batches
