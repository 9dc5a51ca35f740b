"""The operator table against the one torch itself computes, to the nanosecond."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from torchperfd_daemon import analysis
from torchperfd_daemon.analysis.operators import operators

pytestmark = pytest.mark.slow

torch = pytest.importorskip("torch")
profiling = pytest.importorskip("torch.profiler")

STEPS = 3
# A row of key_averages(): calls, self and total ns, self and total bytes.
Row = tuple[int, int, int, int, int]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def profile_training(**options: Any) -> Any:
    """Train a small CNN with a transformer layer for a few recorded steps; return the profiler."""
    nn = torch.nn
    torch.manual_seed(0)
    convolve = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
    attend = nn.Sequential(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), nn.Linear(16, 3))
    optimizer = torch.optim.Adam([*convolve.parameters(), *attend.parameters()])
    images, labels = torch.randn(4, 1, 8, 8), torch.tensor([0, 1, 2, 0])
    plan = profiling.schedule(wait=0, warmup=1, active=STEPS, repeat=1)
    with cpu_profile(schedule=plan, **options) as profiler:
        for _ in range(STEPS + 1):
            optimizer.zero_grad()
            with profiling.record_function("convolve"):
                features = convolve(images)
            scores = attend(features.reshape(len(images), -1, 16)).mean(1)
            nn.functional.cross_entropy(scores, labels).backward()
            optimizer.step()
            profiler.step()
    return profiler


def cpu_profile(**options: Any) -> Any:
    return profiling.profile(activities=[profiling.ProfilerActivity.CPU], acc_events=True, **options)


def torch_table(profiler: Any, *, by_shape: bool = False) -> dict[tuple[str, bool, str], Row]:
    """Torch's rows by (name, is an annotation, shapes); its µs are sums of doubles, off by far under 1 ns."""
    return {
        (row.key, bool(getattr(row, "is_user_annotation", False)), str(row.input_shapes)): (
            row.count,
            round(row.self_cpu_time_total * 1000),
            round(row.cpu_time_total * 1000),
            row.self_cpu_memory_usage,
            row.cpu_memory_usage,
        )
        for row in profiler.key_averages(group_by_input_shape=by_shape)
    }


def our_table(
    trace: analysis.Trace, *, python_functions: bool = False, by_shape: bool = False
) -> dict[tuple[str, bool, str], Row]:
    table = operators(trace, python_functions=python_functions, group_by="shape" if by_shape else "name")
    return {
        (row.name, row.category == "user_annotation", (row.shapes or "[]") if by_shape else ""): (
            row.calls,
            row.self_cpu_ns,
            row.total_cpu_ns,
            row.self_cpu_memory,
            row.total_cpu_memory,
        )
        for row in table
    }


def test_the_table_of_a_training_loop_is_torchs_own(tmp_path: Path) -> None:
    profiler = profile_training()
    file = tmp_path / "rank0.json"
    profiler.export_chrome_trace(str(file))
    trace = analysis.load(file)

    expected = torch_table(profiler)
    assert our_table(trace) == expected
    assert expected["aten::convolution", False, ""][0] == STEPS
    assert expected["ProfilerStep*", True, ""][0] == STEPS
    assert [step.index for step in analysis.summarise(trace).steps] == [1, 2, 3]
    assert trace.skipped == 0


def test_the_table_with_python_frames_is_torchs_own(tmp_path: Path) -> None:
    profiler = profile_training(with_stack=True, record_shapes=True, profile_memory=True)
    file = tmp_path / "rank0.json.gz"
    profiler.export_chrome_trace(str(file))

    trace = analysis.load(file)
    assert our_table(trace, python_functions=True) == torch_table(profiler)
    by_shape = torch_table(profiler, by_shape=True)
    assert our_table(trace, python_functions=True, by_shape=True) == by_shape
    assert any(row[3] for row in by_shape.values())
    assert any("[4, 1, 8, 8]" in shapes for _, _, shapes in by_shape)


def never_closed(stack: contextlib.ExitStack) -> None:
    stack.enter_context(profiling.record_function("open"))
    torch.ones(64).sum()


def closed_around_one_left_open(stack: contextlib.ExitStack) -> None:
    with profiling.record_function("outer"):
        stack.enter_context(profiling.record_function("open"))
        torch.ones(64).sum()
    torch.ones(64).sum()


def one_left_open_in_another(stack: contextlib.ExitStack) -> None:
    never_closed(stack)
    stack.enter_context(profiling.record_function("also open"))
    torch.ones(64).sum()


@pytest.mark.parametrize("work", [never_closed, closed_around_one_left_open, one_left_open_in_another])
def test_what_the_profilers_stop_left_open_counts_as_in_torch(
    work: Callable[[contextlib.ExitStack], None], tmp_path: Path
) -> None:
    # Not to be closed under another profiler: torch would write into this one's memory, which is gone.
    left_open = contextlib.ExitStack()
    with cpu_profile(profile_memory=True) as profiler:
        work(left_open)
    file = tmp_path / "rank0.json"
    profiler.export_chrome_trace(str(file))
    left_open.close()

    table = our_table(analysis.load(file))
    assert table == torch_table(profiler)
    assert table["open", True, ""][1] == 0 < table["open", True, ""][2]


def test_module_operators_are_found_in_forward_and_backward(tmp_path: Path) -> None:
    profiler = profile_training(with_stack=True)
    file = tmp_path / "rank0.json"
    profiler.export_chrome_trace(str(file))
    trace = analysis.load(file)

    by_module = {(row.name, row.module): row.calls for row in operators(trace, group_by="module")}
    assert by_module["aten::convolution", "Conv2d_0"] == STEPS
    assert by_module["aten::convolution_backward", "Conv2d_0"] == STEPS
    calls: Counter[str] = Counter()
    for row in operators(trace, group_by="stack", frames=3):
        calls[row.name] += row.calls
        if row.name == "aten::conv2d":
            assert row.stack[1].endswith(": _conv_forward")
    assert calls == {row.name: row.calls for row in operators(trace)}


def test_the_table_of_ddp_is_torchs_own_by_name_and_shape(tmp_path: Path) -> None:
    distributed = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with cpu_profile(record_shapes=True, profile_memory=True) as profiler:
            for _ in range(STEPS):
                optimizer.zero_grad()
                model(torch.randn(4, 8)).sum().backward()
                optimizer.step()
    finally:
        distributed.destroy_process_group()
    file = tmp_path / "rank0.json"
    profiler.export_chrome_trace(str(file))

    trace = analysis.load(file)
    assert our_table(trace) == torch_table(profiler)
    assert our_table(trace, by_shape=True) == torch_table(profiler, by_shape=True)
    assert any("all_reduce" in row.name for row in operators(trace))


def test_asynchronous_collectives_have_no_self_time_as_in_torch(tmp_path: Path) -> None:
    distributed = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        values = torch.ones(16)
        with cpu_profile() as profiler:
            for _ in range(3):
                distributed.all_reduce(values)
    finally:
        distributed.destroy_process_group()
    file = tmp_path / "rank0.json"
    profiler.export_chrome_trace(str(file))

    table = our_table(analysis.load(file))
    assert table == torch_table(profiler)
    assert table["gloo:all_reduce", True, ""][1] == 0
