"""The picture of one step in the page, frames of libraries, and facts of the capture."""

import json
from pathlib import Path

import pytest
from tests.support.values import some
from tests.unit.daemon.kept import add
from tests.unit.daemon.traces import event, trace_of

from torchperfd_cli.commands._traces import capture_facts, capture_record
from torchperfd_daemon import analysis
from torchperfd_daemon.analysis.callers import is_library
from torchperfd_daemon.analysis.picture import StepPicture
from torchperfd_daemon.captures.catalog import Catalog


def step_of(events: list[str]) -> StepPicture:
    picture = some(analysis.summarise(trace_of(events), rectangles=1000).picture)
    return some(picture.step)


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
    picture = some(analysis.summarise(trace_of([event("aten::mm", 0, 1000)]), rectangles=1000).picture)
    assert picture.step is None


def test_crowded_step_is_merged_and_stays_bounded() -> None:
    events = [event("ProfilerStep#0", 0, 40_000_000, cat="user_annotation")]
    events += [event("op", 1000 * at, 1000 * at + 500) for at in range(1, 30_000)]
    picture = some(analysis.summarise(trace_of(events), rectangles=100_000).picture)
    assert picture.step is not None
    drawn = sum(len(lane.start) for lane in picture.step.timeline.lanes)
    assert drawn <= 12_000
    assert picture.step.timeline.resolution_ns > 0
    assert sum(lane.count.sum() for lane in picture.step.timeline.lanes) == len(events)


@pytest.mark.parametrize(
    ("name", "library"),
    [
        ("train.py(3): main", False),
        ("/home/me/project/model.py(70): forward", False),
        ("project/torch/model.py(70): forward", False),
        ("nn.Module: Linear_0", False),
        ("aten::linear", False),
        ("torch/nn/modules/module.py(1751): _call_impl", True),
        ("threading.py(982): run", True),
        ("<built-in method linear of type object at 0x7f>", True),
        ("<frozen importlib._bootstrap>(1171): _find_and_load", True),
        ("/opt/venv/lib/python3.12/site-packages/mylib/a.py(1): f", True),
        ("/usr/lib/python3.11/queue.py(1): get", True),
        ("numpy/core/numeric.py(4): ones", True),
    ],
)
def test_frame_is_a_librarys_by_its_path(name: str, library: bool) -> None:
    assert is_library(name) is library


def test_devices_of_a_trace_are_named_once() -> None:
    devices = [{"id": number, "name": "NVIDIA H100", "totalGlobalMem": 5} for number in range(2)]
    summary = analysis.summarise(trace_of([event("aten::mul", 0, 10)], deviceProperties=devices))
    assert analysis.to_dict(summary, 0)["trace"]["device_names"] == ["NVIDIA H100"]


def test_capture_of_a_trace_has_its_run_and_time(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path / "captures")
    record = add(catalog, "20260101T000000Z-aaaaaa", {0: b"{}", 1: b"{}"})
    folder = catalog.folder(record.capture_id)
    for paths in ([folder], [folder / "rank0.json"], [folder / "rank0.json", folder / "rank1.json"]):
        facts = some(capture_facts(capture_record(paths)))
        assert (facts["run"], facts["capture_id"]) == (record.run, record.capture_id)
        assert facts["requested_at"] == record.requested_at


def test_trace_outside_of_a_capture_has_no_facts(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    assert capture_facts(capture_record([tmp_path])) is None
    assert capture_facts(capture_record([tmp_path / "trace.json"])) is None
    assert capture_facts(capture_record([tmp_path / "trace.json", tmp_path / "other"])) is None
