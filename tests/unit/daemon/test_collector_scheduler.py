"""The collector scheduler: one thread, a fixed grid, and a new thread where a sampler hangs."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
from tests.support.clock import Clock
from tests.support.node import eventually
from tests.unit.daemon.test_collectors import Scripted, gauge, raising

from torchperfd_daemon.background import StoppedWorkers
from torchperfd_daemon.collectors.base import CollectorScheduler, Family, Sampler

GIVE_UP_S = 20


class Waits(threading.Event):
    """A stop event that records each wait instead of waiting, and is set after enough of them."""

    def __init__(self, now: list[float], rounds: int) -> None:
        super().__init__()
        self.waited: list[float] = []
        self._now, self._rounds = now, rounds

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.waited.append(timeout)
        self._now[0] += timeout
        if len(self.waited) == self._rounds:
            self.set()
        return self.is_set()


class Hanging:
    """A collector that hangs until it is released; each time it is asked."""

    name = "hanging"

    def __init__(self) -> None:
        self.asked, self.released = threading.Event(), threading.Event()
        self.thread = threading.current_thread()

    def sample(self) -> Sequence[Family]:
        self.thread = threading.current_thread()
        self.asked.set()
        self.released.wait()
        return gauge(1)


class Counting:
    """A collector that says how often it was asked, and lets a test wait for the next time."""

    name = "counting"

    def __init__(self) -> None:
        self.count = 0
        self._asked = threading.Condition()

    def sample(self) -> Sequence[Family]:
        with self._asked:
            self.count += 1
            self._asked.notify_all()
        return gauge(self.count)

    def wait_for(self, more: int) -> None:
        with self._asked:
            goal = self.count + more
            assert self._asked.wait_for(lambda: self.count >= goal, GIVE_UP_S)


@contextmanager
def running(samplers: Sequence[Sampler], clock: Callable[[], float]) -> Iterator[CollectorScheduler]:
    scheduler = CollectorScheduler(samplers, 0.001, clock)
    scheduler.start()
    try:
        yield scheduler
    finally:
        scheduler.stop()


@pytest.mark.parametrize(
    ("durations", "waits"),
    [
        ([0.25] * 4, [0.75] * 4),
        ([0.25, 0.5, 0.0, 0.25], [0.75, 0.5, 1.0, 0.75]),
        # Once it is late there is no burst to catch up, and the grid stays where it is.
        ([3.5, 0.25, 0.25], [0.5, 0.75, 0.75]),
    ],
)
def test_the_rate_does_not_drift(durations: list[float], waits: list[float]) -> None:
    now = [100.0]
    left = iter(durations)

    def sample() -> Sequence[Family]:
        now[0] += next(left)
        return []

    stop = Waits(now, len(durations))
    sampler = Sampler(Scripted("slow", sample), 1.0, lambda: now[0])
    scheduler = CollectorScheduler([sampler], 1.0, lambda: now[0], stop)
    scheduler.start()
    eventually(stop.is_set, GIVE_UP_S)
    scheduler.stop()
    assert stop.waited == waits


def test_a_failing_collector_does_not_hold_the_others_up() -> None:
    counting = Counting()
    samplers = [Sampler(Scripted("fail", raising(ValueError("x"))), 0.001), Sampler(counting, 0.001)]
    with running(samplers, lambda: 0.0):
        counting.wait_for(3)
        assert [sampler.success for sampler in samplers] == [False, True]


def test_hanging_collector_keeps_its_thread_others_get_a_new_one() -> None:
    now = [0.0]
    hanging, counting, last = Hanging(), Counting(), Counting()
    samplers = [Sampler(counting, 0.001), Sampler(hanging, 0.001), Sampler(last, 0.001)]
    before = threading.active_count()
    with running(samplers, lambda: now[0]) as scheduler:
        assert hanging.asked.wait(GIVE_UP_S)
        held = hanging.thread
        scheduler.replace_worker()
        assert threading.active_count() == before + 1, "it has had no time yet"
        now[0] += 2.5
        scheduler.replace_worker()
        counting.wait_for(3)
        assert threading.active_count() == before + 2
        assert (samplers[1].sampling, samplers[1].families) == (True, ())
        assert samplers[2].families == gauge(last.count)
        hanging.asked.clear()
        hanging.released.set()
        held.join(GIVE_UP_S)
        assert not held.is_alive(), "it was replaced"
        # It runs again on the thread of the others.
        assert hanging.asked.wait(GIVE_UP_S)
    assert threading.active_count() == before


def test_scheduler_replaces_its_worker_as_often_as_needed() -> None:
    now = [0.0]
    hanging, counting = [Hanging(), Hanging()], Counting()
    samplers = [*(Sampler(one, 0.001) for one in hanging), Sampler(counting, 0.001)]
    with running(samplers, lambda: now[0]) as scheduler:
        for one in hanging:
            assert one.asked.wait(GIVE_UP_S)
            now[0] += 2.5
            scheduler.replace_worker()
        counting.wait_for(2)
        for one in hanging:
            one.released.set()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_thread_that_ended_is_replaced() -> None:
    class EndsItsFirstThread(Sampler):
        has_ended = False

        def sample_once(self) -> None:
            if not self.has_ended:
                self.has_ended = True
                raise SystemExit
            super().sample_once()

    def has_sampled() -> bool:
        scheduler.replace_worker()
        return counting.count == 1

    counting = Counting()
    scheduler = CollectorScheduler([EndsItsFirstThread(counting, 60.0)], 60.0)
    scheduler.start()
    try:
        eventually(has_sampled, GIVE_UP_S)
    finally:
        scheduler.stop()


def test_scheduler_whose_collectors_all_hang_has_stopped() -> None:
    clock = Clock()
    hanging = [Hanging(), Hanging()]
    with running([Sampler(one, 0.001) for one in hanging], clock) as scheduler:
        stopped = StoppedWorkers(scheduler.health, clock=clock)
        assert stopped.names() == []
        for one in hanging:
            assert one.asked.wait(GIVE_UP_S)
            clock.now += 2.5
            scheduler.replace_worker()
        clock.now += 16
        assert stopped.names() == ["sampler"]
        hanging[1].released.set()
        eventually(lambda: stopped.names() == [], GIVE_UP_S)
        hanging[0].released.set()


def test_scheduler_of_which_one_collector_hangs_goes_on() -> None:
    clock = Clock()
    hanging, counting = Hanging(), Counting()
    with running([Sampler(hanging, 0.001), Sampler(counting, 0.001)], clock) as scheduler:
        stopped = StoppedWorkers(scheduler.health, clock=clock)
        assert hanging.asked.wait(GIVE_UP_S)
        clock.now += 2.5
        scheduler.replace_worker()
        counting.wait_for(2)
        assert stopped.names() == []
        clock.now += 60
        counting.wait_for(2)
        assert stopped.names() == []
        hanging.released.set()
