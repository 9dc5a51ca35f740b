"""The collectives of one trace: each once, by the event that lasts as long as they do."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.golden import check_golden
from tests.unit.daemon import traces

from torchperfd_cli import main
from torchperfd_daemon import analysis

ALLREDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def args(
    name: str, *, sequence: int | None = None, elements: Any = 10, dtype: str = "Float"
) -> dict[str, Any]:
    """Return the arguments that c10d records of a collective, and Kineto copies to its kernel."""
    found = {
        "Collective name": name,
        "In msg nelems": elements,
        "Out msg nelems": elements,
        "dtype": dtype,
        "Process Group Name": "0",
        "Process Group Ranks": "[0, 1]",
    }
    return found if sequence is None else found | {"Seq": sequence}


def collectives(*events: str) -> list[tuple[str, str, str, int, int, int, int]]:
    """Return name, group, source, sequence, start, end and bytes of each collective of a made-up trace."""
    trace = traces.trace_of([traces.event("aten::add", 0, 1), *events])
    found = analysis.collectives(trace, analysis.steps(trace))
    kinds = [found.kinds[kind] for kind in found.kind.tolist()]
    names = [(kind.name, kind.group, kind.source) for kind in kinds]
    columns = zip(
        names, *(each.tolist() for each in (found.sequence, found.start, found.end, found.bytes)), strict=True
    )
    return [(*name, *numbers) for name, *numbers in columns]


def test_kernel_counts_and_its_launch_call_does_not() -> None:
    assert collectives(
        traces.event("c10d::allreduce_", 10, 30),
        traces.event("record_param_comms", 12, 28, args=args("allreduce", sequence=7)),
        traces.event(ALLREDUCE, 40, 90, cat="kernel", args=args("allreduce", sequence=7)),
    ) == [("allreduce", "0", "kernel", 7, 40, 90, 40)]


def test_kernels_of_one_number_are_one_collective() -> None:
    kernels = [
        traces.event(ALLREDUCE, start, start + 10, cat="kernel", args=args(name, sequence=number))
        for name, number, start in [("b", 1, 5), ("a", 1, 20), ("a", 1, 50), ("a", 2, 80), ("b", 1, 40)]
    ]
    assert collectives(*kernels) == [
        ("b", "0", "kernel", 1, 5, 50, 40),
        ("a", "0", "kernel", 1, 20, 60, 40),
        ("a", "0", "kernel", 2, 80, 90, 40),
    ]


def test_a_kernel_that_says_nothing_has_its_own_name() -> None:
    assert collectives(
        traces.event("ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclDevComm*)", 5, 9, cat="Kernel"),
        traces.event("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 10, 11, cat="kernel"),
        traces.event("ncclDevKernel_Generic(ncclDevComm*)", 12, 13, cat="kernel"),
        traces.event("void gemm()", 14, 15, cat="kernel"),
    ) == [("AllGather", "", "kernel", -1, 5, 9, -1)]


def test_gloos_span_counts_and_says_its_bytes_where_shapes_are() -> None:
    inputs = {"Input Dims": [[3, 5]], "Input type": ["c10::BFloat16"]}
    assert collectives(
        traces.event("c10d::allreduce_", 1, 2),
        traces.event("gloo:all_reduce", 2, 9, cat="user_annotation", thread=2, args=inputs),
        traces.event("gloo:all_gather", 10, 19, cat="user_annotation", thread=2, args=inputs),
        traces.event("gloo:barrier", 20, 29, cat="user_annotation", thread=2),
        traces.event("gloo:all_reduce", 30, 39, cat="user_annotation", args=inputs | {"Input type": ["?"]}),
    ) == [
        ("all_reduce", "", "span", -1, 2, 9, 30),
        ("all_gather", "", "span", -1, 10, 19, -1),
        ("barrier", "", "span", -1, 20, 29, -1),
        ("all_reduce", "", "span", -1, 30, 39, -1),
    ]


def test_the_host_s_call_is_what_is_left_without_a_device() -> None:
    assert collectives(
        traces.event("record_param_comms", 3, 8, args=args("allreduce", dtype="BFloat16")),
        traces.event("record_param_comms", 10, 12, args=args("broadcast", elements="x")),
    ) == [("allreduce", "0", "call", -1, 3, 8, 20), ("broadcast", "0", "call", -1, 10, 12, -1)]


@pytest.mark.parametrize("name", ["send", "recv", "wait", "init", "pointToPoint"])
def test_what_not_all_ranks_take_part_in_is_no_collective(name: str) -> None:
    assert (
        collectives(
            traces.event("record_param_comms", 3, 8, args=args(name)),
            traces.event(f"gloo:{name}", 10, 12, cat="user_annotation"),
            traces.event("ncclDevKernel_SendRecv()", 20, 22, cat="kernel", args=args(name)),
            traces.event(ALLREDUCE, 30, 32, cat="kernel", args=args(name)),
        )
        == []
    )


def rank_file(rank: int, *, base_ns: int, late: int) -> str:
    """Return a whole trace of a rank that comes so many ns late to each of three collectives."""
    events = []
    for step in range(3):
        at, end = step * 2_000_000, step * 2_000_000 + 1_500_000
        call = args("allreduce", sequence=step, elements=1_000_000)
        events.append(traces.event(f"ProfilerStep#{step}", at, end, cat="user_annotation"))
        events.append(traces.event(ALLREDUCE, at + 100_000 + late, end, cat="kernel", thread=7, args=call))
    document = json.loads(traces.document(events))
    extra = {"baseTimeNanoseconds": base_ns, "distributedInfo": {"rank": rank, "world_size": 4}}
    return json.dumps({**extra, **document})


def test_the_text_across_ranks_is_the_golden_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for rank, late in enumerate([0, 1_000_000, 20_000]):
        base = 5_000_000_000 if rank == 2 else 0
        (tmp_path / f"rank{rank}.json").write_text(rank_file(rank, base_ns=base, late=late))
    assert main.run_command(["analyze", str(tmp_path)]) == 0
    out = capfd.readouterr().out
    text = out[out.index("across ranks") : out.index("\nrank 1: ")]
    check_golden("across.txt", text)
    assert max(map(len, text.splitlines())) <= 110


def test_json_names_the_late_rank_and_its_lateness(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for rank, late in enumerate([0, 1_000_000]):
        (tmp_path / f"rank{rank}.json").write_text(rank_file(rank, base_ns=0, late=late))
    assert main.run_command(["analyze", str(tmp_path), "--json"]) == 0
    across = json.loads(capfd.readouterr().out)["across"]
    assert across["matched_by"] == {"sequence": 3, "order": 0, "end": 0}
    assert (across["matched"], across["steps"], across["missing"], across["slowest"]) == (3, 3, [2, 3], 1)
    assert across["ranks"][1] == {
        "rank": 1,
        "matched": 3,
        "unmatched": 0,
        "wait_us": 0.0,
        "last": 3,
        "cost_us": 3000.0,
        "cost_per_step_us": 1000.0,
        "clock_us": 0.0,
        "clock_residual_us": 0.0,
    }
    assert across["collectives"] == [
        {
            "name": "allreduce",
            "group": "0",
            "ranks": [0, 1],
            "timed_by": "kernel",
            "calls": 3,
            "bytes": 12_000_000,
            "transfer_us": 1200.0,
            "wait_us": 3000.0,
            "bytes_per_second": 1e10,
        }
    ]


def test_a_truncated_rank_is_matched_as_far_as_it_goes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = rank_file(0, base_ns=0, late=0)
    (tmp_path / "rank0.json").write_text(whole)
    (tmp_path / "rank1.json").write_text(whole[: whole.rindex('"Seq": 2') - 40])
    assert main.run_command(["analyze", str(tmp_path), "--json"]) == 0
    across = json.loads(capfd.readouterr().out)["across"]
    assert [(each["matched"], each["unmatched"]) for each in across["ranks"]] == [(2, 1), (2, 0)]
