"""The operator table against the one torch itself computes, to the nanosecond."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from torchperfd_daemon import analysis
from torchperfd_daemon.analysis.operators import operators

torch = pytest.importorskip("torch")
profiling = pytest.importorskip("torch.profiler")

STEPS = 3
# A row of key_averages(): calls, self ns, total ns.
Row = tuple[int, int, int]


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


def torch_table(profiler: Any) -> dict[tuple[str, bool], Row]:
    """Torch's rows by (name, is an annotation); its µs are sums of doubles, off by far under 1 ns."""
    return {
        (row.key, row.is_user_annotation): (
            row.count,
            round(row.self_cpu_time_total * 1000),
            round(row.cpu_time_total * 1000),
        )
        for row in profiler.key_averages()
        if row.key != "[memory]"
    }


def our_table(trace: analysis.Trace, *, python_functions: bool = False) -> dict[tuple[str, bool], Row]:
    return {
        (row.name, row.category == "user_annotation"): (row.calls, row.self_cpu_ns, row.total_cpu_ns)
        for row in operators(trace, python_functions=python_functions)
    }


def test_the_table_of_a_training_loop_is_torchs_own(tmp_path: Path) -> None:
    profiler = profile_training()
    file = tmp_path / "rank0.json"
    profiler.export_chrome_trace(str(file))
    trace = analysis.load(file)

    expected = torch_table(profiler)
    assert our_table(trace) == expected
    assert expected["aten::convolution", False][0] == STEPS
    assert expected["ProfilerStep*", True][0] == STEPS
    assert [step.index for step in analysis.summarise(trace).steps] == [1, 2, 3]
    assert trace.skipped == 0


def test_the_table_with_python_frames_is_torchs_own(tmp_path: Path) -> None:
    profiler = profile_training(with_stack=True, record_shapes=True, profile_memory=True)
    file = tmp_path / "rank0.json.gz"
    profiler.export_chrome_trace(str(file))

    assert our_table(analysis.load(file), python_functions=True) == torch_table(profiler)


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
    assert table["gloo:all_reduce", True][1] == 0
