"""Our own cost, measured on a scripted tape and clock: what was put in comes out, and limits are kept."""

import itertools
import random
import time
from struct import pack

import pytest
import torch
from tests.unit.client.training import calls, loader, tiny_model, train

import torchperfd
from torchperfd.overhead import SHED, Overhead
from torchperfd.tape import Tape
from torchperfd.tape import events as on_tape

SGD, ADAM = 42, 43


class Training:
    """Plays steps of a given length, longer while they are doubled, and lets the pump turn."""

    def __init__(self, step_ns: int, cost_ns: int, limit: float | None = None, pump: float = 0.0) -> None:
        self.tape = Tape(16)
        self.now_ns = 10**9
        self.pump = pump
        self.overhead = Overhead(
            self.tape,
            limit,
            clock=lambda: self.now_ns / 1e9,
            pump_clock=lambda: self.pump * self.now_ns / 1e9,
        )
        self._step_ns = step_ns
        self._cost_ns = cost_ns
        self._random = random.Random(0)

    def run(self, seconds: float, noise: float = 0.0) -> None:
        until, turn = self.now_ns + round(seconds * 1e9), self.now_ns
        while self.now_ns < until:
            if self.tape.doubled:
                self._happens(on_tape.SHADOW, times=10)
            self.now_ns += round(self._step_ns * (1 + noise * self._random.random()))
            self.now_ns += self._cost_ns * self.tape.doubled
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


def test_what_the_pump_takes_counts() -> None:
    training = Training(1_000_000, 4_000, pump=0.01)
    training.run(30)
    assert training.overhead.ratio == pytest.approx(0.014, abs=1e-4)


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


def test_a_real_training_is_measured_and_counted_the_same(client: torchperfd.Client) -> None:
    """All events of the doubled steps are there once."""
    client._pump.stop(5)
    overhead = client._replay.overhead
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = 0
    deadline = time.monotonic() + 60
    while overhead.ratio is None and time.monotonic() < deadline:
        train(model, optimizer, loader(3))
        steps += 3
        client.report()
        overhead.turn(client._pump.account.train.mean_seconds)
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
