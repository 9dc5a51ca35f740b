"""Traces, snapshots and reports of runs with long names and large numbers, too wide for narrow tables."""

import json
from collections.abc import Sequence
from pathlib import Path

from tests.support.run_documents import run_file
from tests.unit.daemon import traces
from tests.unit.daemon.memory_snapshots import fragmented, write

KERNEL = (
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel"
    "<at::native::TensorListMetadata<4>, at::native::FusedAdamMathFunctor<float, 4> >(int, float)"
)
BACKWARD = "autograd::engine::evaluate_function: ConvolutionBackward0"
ALLREDUCE = "nccl:_all_gather_base_of_everyone_with_a_name_of_more_than_eighty_columns_in_all"
RUNS = ("train_remote_digits_of_everyone-5f1bf50a-7c1e", "train_remote_digits_of_everyone-77aa03b2-1d9f")
PHASE = "augment_with_every_augmentation_that_there_is_for_remote_digits"


def write_wide_files(directory: Path) -> None:
    """Write two traces, a capture of two ranks, a snapshot of memory and the reports of two runs.

    ``before.json`` and ``after.json``, ``ranks/``, ``memory.pickle``, and ``a.json`` and ``b.json``.
    """
    _write_trace(directory / "before.json", (2_000_000_000, 2_000_001_000, 2_000_002_000), "aten::relu")
    _write_trace(directory / "after.json", (31_000_000_000, 31_000_001_000, 31_000_002_000), "aten::gelu")
    (directory / "ranks").mkdir()
    for rank in range(2):
        _write_rank(directory / "ranks" / f"rank{rank}.json", rank)
    write(directory / "memory.pickle", fragmented())
    for name, run, slower in zip(("a", "b"), RUNS, (1.0, 1.5), strict=True):
        report = run_file(run, steps=600, seconds={PHASE: 1.0 * slower, "forward": 12.0})
        (directory / f"{name}.json").write_text(json.dumps(report | {"world_size": 64}))


def _write_trace(file: Path, lengths: Sequence[int], extra: str) -> None:
    """Write a trace with a step of each length, in ns."""
    events, at = [], 1
    for number, length in enumerate(lengths):
        linked = {"External id": number + 1}
        events += [
            traces.event(f"ProfilerStep#{number}", at, at + length + 600_000, cat="user_annotation"),
            traces.event(BACKWARD, at + 1000, at + length, args=linked),
            traces.event(KERNEL, at + 2000, at + length, cat="kernel", thread=7, args=linked),
            traces.event(extra, at + length, at + length + 200_000),
            traces.event("Optimizer.step#SGD.step", at + length + 300_000, at + length + 500_000),
        ]
        at += length + 600_000
    file.write_text(traces.document(events))


def _write_rank(file: Path, rank: int) -> None:
    """Write a trace of a rank; rank 1 comes late to each of three collectives."""
    events = []
    for step in range(3):
        at, end = step * 20_000_000_000, step * 20_000_000_000 + 15_000_000_000
        call = {
            "Collective name": ALLREDUCE,
            "In msg nelems": 10**12,
            "Out msg nelems": 10**12,
            "dtype": "Float",
            "Process Group Name": "default_pg",
            "Process Group Ranks": "[0, 1]",
            "Seq": step,
        }
        begin = at + 100_000 + rank * 5_000_000_000
        events.append(traces.event(f"ProfilerStep#{step}", at, end, cat="user_annotation"))
        events.append(traces.event(f"{ALLREDUCE}(int)", begin, end, cat="kernel", thread=7, args=call))
    facts = {"baseTimeNanoseconds": 0, "distributedInfo": {"rank": rank, "world_size": 2}}
    file.write_text(json.dumps({**facts, **json.loads(traces.document(events))}))
