"""Steps that become longer with each step, compared with steps that do not."""

from collections.abc import Callable

import numpy as np
import pytest

from torchperfd_daemon.observer.rank_window import StepGrowth


def watched(step_ns: Callable[[int], float], *, samples: int = 60, noise: float = 0.0) -> StepGrowth:
    """Return the growth of steps by their number, ten a sample; ``backward`` has what exceeds the first."""
    growth, chance = StepGrowth(), np.random.default_rng(4)
    total, backward = 0.0, 0.0
    for step in range(10 * samples):
        took = step_ns(step) * (1 + noise * chance.standard_normal())
        total += took
        backward += took - step_ns(0) / 2
        if step % 10 == 9:
            growth.observe(step + 1, total, np.array([total - backward, backward, 0.0]))
    return growth


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("samples", [24, 60, 600])
def test_growth_of_a_kept_graph_is_found_with_its_phase(samples: int, noise: float) -> None:
    growth = watched(lambda step: 10e6 + 0.25e6 * step, samples=samples, noise=noise)
    assert growth.seconds == pytest.approx(0.25e-3, rel=0.1)
    assert growth.column == 1


def step_change(step: int) -> float:
    return 10e6 if step < 300 else 20e6


def warm_up(step: int) -> float:
    return 10e6 + 100e6 * 0.9**step


def change_amid_drift(step: int) -> float:
    return step_change(step) + 10e3 * step


@pytest.mark.parametrize(
    "step_ns",
    [
        lambda _: 10e6,
        step_change,
        change_amid_drift,
        warm_up,
        lambda step: 10e6 - 5e3 * step,
        lambda step: 10e6 + 100 * step,
    ],
)
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_steps_that_do_not_grow_steadily_are_left_alone(
    step_ns: Callable[[int], float], noise: float
) -> None:
    assert watched(step_ns, noise=noise).seconds == 0.0


def test_growth_that_has_just_begun_is_not_certain() -> None:
    assert watched(lambda step: 10e6 + 1e6 * step, samples=12).seconds == 0.0


def test_growth_that_ends_is_withdrawn() -> None:
    grown = watched(lambda step: 10e6 + 0.25e6 * min(step, 250), samples=200)
    assert grown.seconds == 0.0
