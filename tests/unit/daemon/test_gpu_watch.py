"""The device of one rank over some samples."""

import pytest

from torchperfd_daemon.observer.node_context import GpuState, GpuWatch

PID = 7


def test_device_is_not_idle_while_its_use_is_unknown() -> None:
    """A rank's GPU is found some seconds after its first step, and the driver may pause."""
    watch = GpuWatch(0.0)
    for now, use in enumerate((None, None, 0.25, None, 0.5), start=1):
        watch.follow(now, GpuState(utilization=use), PID, frozenset())
        assert watch.is_known is (use is not None)
    assert watch.busy_seconds == pytest.approx(1 + 1 + 0.25 + 1 + 0.5)


def test_clock_is_compared_with_its_highest_value() -> None:
    watch = GpuWatch(0.0)
    assert watch.slowdown == 0.0
    for now, clock in enumerate((1.5e9, 2e9, 1.5e9), start=1):
        watch.follow(now, GpuState(clock_hertz=clock), PID, frozenset())
    assert watch.slowdown == pytest.approx(0.25)


@pytest.mark.parametrize(("held_by", "foreign"), [({PID, 8, 9}, 1), ({8, 9}, 0), ({PID, 8}, 0)])
def test_others_are_counted_where_the_driver_shows_the_rank(held_by: set[int], foreign: int) -> None:
    watch = GpuWatch(0.0)
    watch.follow(1.0, GpuState(processes=frozenset(held_by)), PID, frozenset({PID, 8}))
    assert watch.foreign == foreign
