"""One step in full: which events it has, with their shapes and their launches."""

import json

from tests.unit.daemon.traces import event, trace_of

from torchperfd_daemon import analysis
from torchperfd_daemon.analysis.picture import StepPicture


def step_of(events: list[str]) -> StepPicture:
    picture = analysis.summarise(trace_of(events), rectangles=1000).picture
    assert picture is not None
    assert picture.step is not None
    return picture.step


def names_of(step: StepPicture, kind: str) -> list[str]:
    return [
        step.timeline.names[name]
        for lane in step.timeline.lanes
        for name in lane.name.tolist()
        if lane.kind == kind
    ]


def three_steps() -> list[str]:
    """Steps of 1, 3 and 2 ms; the kernel of each runs after its end, and the first one's late in the last."""
    made = []
    for step, (start, end) in enumerate(((0, 1_000_000), (1_000_000, 4_000_000), (4_000_000, 6_000_000))):
        made += [
            event(f"ProfilerStep#{step}", start, end, cat="user_annotation"),
            event("train.py(3): main", start, end, cat="python_function"),
            event(
                f"aten::mm{step}", start + 100, start + 90_000, args={"Input Dims": [[step + 1, 8], [8, 8]]}
            ),
            event(
                "cudaLaunchKernel",
                start + 200,
                start + 900,
                cat="cuda_runtime",
                args={"correlation": step + 1},
            ),
            event(
                f"gemm{step}",
                end + 50_000,
                end + 60_000 + 1000 * step,
                cat="kernel",
                thread=7,
                args={"correlation": step + 1},
            ),
        ]
    return made


def test_step_picture_is_of_the_median_step() -> None:
    step = step_of(three_steps())
    assert step.index == 2
    assert step.start == 4_000_000
    # Its own kernel runs after it; the kernel of the step before runs within its time.
    assert names_of(step, "stream") == ["gemm1", "gemm2"]
    assert step.end == 6_062_000
    assert set(names_of(step, "thread")) == {"ProfilerStep#2", "aten::mm2", "cudaLaunchKernel"}
    assert step.timeline.resolution_ns == 0


def test_step_picture_has_shapes_and_launches() -> None:
    step = step_of(three_steps())
    shown = {}
    for lane, shape, correlation in zip(step.timeline.lanes, step.shape, step.correlation, strict=True):
        for name, number, other in zip(lane.name.tolist(), shape.tolist(), correlation.tolist(), strict=True):
            shown[step.timeline.names[name]] = (step.shapes[number], other)
    assert json.loads(shown["aten::mm2"][0]) == [[3, 8], [8, 8]]
    assert shown["aten::mm2"][1] == -1
    assert shown["cudaLaunchKernel"] == ("", 3)
    assert shown["gemm2"] == ("", 3)


def test_trace_without_steps_has_no_step_picture() -> None:
    picture = analysis.summarise(trace_of([event("aten::mm", 0, 1000)]), rectangles=1000).picture
    assert picture is not None
    assert picture.step is None


def test_crowded_step_is_merged_and_stays_bounded() -> None:
    events = [event("ProfilerStep#0", 0, 40_000_000, cat="user_annotation")]
    events += [event("op", 1000 * at, 1000 * at + 500) for at in range(1, 30_000)]
    picture = analysis.summarise(trace_of(events), rectangles=100_000).picture
    assert picture is not None
    assert picture.step is not None
    drawn = sum(len(lane.start) for lane in picture.step.timeline.lanes)
    assert drawn <= 12_000
    assert picture.step.timeline.resolution_ns > 0
    assert sum(lane.count.sum() for lane in picture.step.timeline.lanes) == len(events)
