"""Detectors run for weeks: each keeps bounded memory, however many steps it observes."""

import pickle
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from torchperfd_daemon.diagnosis.detect.onset import OnsetDetector
from torchperfd_daemon.diagnosis.detect.spikes import SpikeDetector
from torchperfd_daemon.diagnosis.detect.stall import StallDetector
from torchperfd_daemon.diagnosis.detect.trends import RegressionDetector


def step_times() -> Iterator[float]:
    """Yield step times with frequent long steps, in seconds."""
    chance = random.Random(5)
    while True:
        yield chance.uniform(0.1, 0.2) * chance.choice((1, 1, 1, 50))


def onset() -> tuple[OnsetDetector, Callable[[float], object]]:
    detector = OnsetDetector()
    return detector, detector.observe


def spikes() -> tuple[SpikeDetector, Callable[[float], object]]:
    detector = SpikeDetector(2)
    return detector, lambda seconds: detector.observe(seconds, {"data": seconds / 2}, seconds / 4)


def stall() -> tuple[StallDetector, Callable[[float], object]]:
    detector = StallDetector()
    now = [0.0]

    def observe(seconds: float) -> None:
        now[0] += seconds
        detector.step(now[0])

    return detector, observe


def regression() -> tuple[RegressionDetector, Callable[[float], object]]:
    detector = RegressionDetector()
    return detector, lambda seconds: detector.observe(seconds, 32.0)


@pytest.mark.parametrize(
    ("make", "most_bytes"), [(onset, 10_000), (spikes, 3_500), (stall, 4_500), (regression, 3_500)]
)
def test_detector_many_steps_keep_its_memory_bounded(
    make: Callable[[], tuple[Any, Callable[[float], object]]], most_bytes: int
) -> None:
    detector, observe = make()
    steps = step_times()
    for _ in range(20_000):
        observe(next(steps))
    assert len(pickle.dumps(detector)) <= most_bytes
