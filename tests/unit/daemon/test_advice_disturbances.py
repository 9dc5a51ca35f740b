"""Time that single steps lose to something else than the loop, and what it does to the cost of recording."""

import numpy as np
import pytest
from tests.unit.daemon import traces

from torchperfd_daemon import analysis
from torchperfd_daemon.analysis.advice.context import AdviceContext
from torchperfd_daemon.analysis.advice.recording import find_disturbances
from torchperfd_daemon.analysis.intervals import Cover

US, MS = 1_000, 1_000_000
STEP = 2 * MS
OPERATORS = 100


def loop(*, steps: int = 5, gap: int = US, at: tuple[int, int] = (2, 60), pause: int = 0) -> list[str]:
    """Steps of operators of 2 µs; after one operator of one step there is a pause."""
    events = []
    now = 0
    for step in range(steps):
        begun = now
        for number in range(OPERATORS):
            events.append(traces.event("aten::mul" if number % 2 else "aten::add", now, now + 2 * US))
            now += 2 * US + gap + (pause if (step, number) == at else 0)
        now = begun + STEP + (pause if step == at[0] else 0)
        events.append(traces.event(f"ProfilerStep#{step}", begun, now, cat="user_annotation"))
    return events


def found(events: list[str]) -> Cover:
    trace = traces.trace_of(events)
    starts = np.array([step.start_ns for step in analysis.steps(trace)], dtype=np.int64)
    return find_disturbances(trace, np.flatnonzero(trace.of_categories({"cpu_op"})), starts)


def test_disturbance_a_pause_of_one_step_is_the_rest_of_it() -> None:
    cover = found(loop(pause=3 * MS))
    begun = 2 * STEP + 61 * 3 * US
    assert cover.length == 3 * MS
    assert cover.contains(np.array([begun - 1, begun, begun + 3 * MS - 1, begun + 3 * MS])).tolist() == [
        False,
        True,
        True,
        False,
    ]


def test_disturbance_within_an_operator_is_found() -> None:
    events = loop()
    events[0] = traces.event("aten::add", 0, 2 * US)
    long = [traces.event("aten::outer", step * STEP + MS, step * STEP + MS + 5 * US) for step in range(4)]
    long.append(traces.event("aten::outer", 4 * STEP + MS, 4 * STEP + MS + 905 * US))
    assert found(events + long).length == 900 * US


@pytest.mark.parametrize(
    "events",
    [loop(gap=15 * US), loop(pause=15 * US), loop(steps=2, pause=3 * MS), loop(steps=1), []],
    ids=["always", "short", "two steps", "one step", "no step"],
)
def test_disturbance_what_every_step_has_is_none(events: list[str]) -> None:
    assert found(events or [traces.event("aten::add", 0, 1)]).length == 0


def context_of(events: list[str], unrecorded_ns: int) -> AdviceContext:
    trace = traces.trace_of(events, torchperfd={"unrecorded_step_ns": unrecorded_ns})
    steps = analysis.steps(trace)
    return AdviceContext(
        trace, steps, analysis.DeviceTime(trace).within([step.window for step in steps]), None
    )


@pytest.mark.parametrize("at", [(0, 10), (2, 60), (4, 98)])
def test_recording_cost_is_that_of_undisturbed_steps(at: tuple[int, int]) -> None:
    unrecorded = STEP - 60 * US
    calm, disturbed = (context_of(loop(pause=pause, at=at), unrecorded) for pause in (0, 4 * MS))
    costs = [each.recording(np.array([0]), np.array([30 * US])).item() for each in (calm, disturbed)]
    assert costs[1] == pytest.approx(costs[0], rel=0.02)
    assert disturbed.step_ns == pytest.approx(calm.step_ns, rel=1e-3)
    assert disturbed.calls.own_ns.sum() == calm.calls.own_ns.sum()
    assert disturbed.calls.between_ns.sum() == pytest.approx(calm.calls.between_ns.sum(), rel=1e-3)


def test_disturbance_that_unrecorded_steps_have_too_is_the_loops() -> None:
    everything = np.array([0]), np.array([9 * STEP])
    usual, as_long = (context_of(loop(pause=4 * MS), STEP + more) for more in (0, 4 * MS // 5))
    assert as_long.recording(*everything).item() < MS < 4 * MS < usual.recording(*everything).item()


@pytest.mark.parametrize("name", ["gloo:all_reduce", "enumerate(DataLoader)#_MultiProcessingDataLoaderIter"])
def test_disturbance_of_a_process_with_others_is_the_loops(name: str) -> None:
    """Ranks and workers take the CPUs from each other when nothing is recorded as well."""
    shared = traces.event(name, 500 * US, 600 * US, cat="user_annotation", thread=9)
    pauses = loop(pause=4 * MS)
    alone, together = (
        context_of(events, STEP).recording(np.array([0]), np.array([9 * STEP])).item()
        for events in (pauses, [*pauses, shared])
    )
    assert together < MS < 4 * MS < alone
