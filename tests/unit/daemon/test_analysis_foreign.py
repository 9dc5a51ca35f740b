"""Traces of other tools and vendors, and files that are no traces."""

import bz2
import json
import lzma
import pickle
import sqlite3
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from tests.support.golden import GOLDEN

from torchperfd_daemon import analysis
from torchperfd_daemon.analysis.categories import Hint, category, inferred


def complete(
    name: str, ts: Any, dur: Any, *, pid: Any = 4100, tid: Any = 4100, **more: Any
) -> dict[str, Any]:
    return {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur} | more


def kernel(name: str, ts: Any, dur: Any, correlation: int, *, pid: int = 0) -> dict[str, Any]:
    args = {"device": pid, "stream": 7, "correlation": correlation}
    return complete(name, ts, dur, pid=pid, tid=7, cat="kernel", args=args)


def launch(ts: Any, correlation: int, *, pid: int = 4100) -> dict[str, Any]:
    args = {"correlation": correlation}
    return complete("cudaLaunchKernel", ts, 2, pid=pid, tid=pid, cat="cuda_runtime", args=args)


def read(tmp_path: Path, content: Any) -> analysis.Trace:
    file = tmp_path / "t.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return analysis.load(file)


def whole(*events: dict[str, Any], **header: Any) -> dict[str, Any]:
    return {"schemaVersion": 1, **header, "traceEvents": list(events), "traceName": "t"}


def busy_and_window(trace: analysis.Trace) -> tuple[int, int]:
    device = analysis.DeviceTime(trace).all()
    return device.busy_ns, device.window_ns


STEP = complete("ProfilerStep#1", "1704161511420306.491", 200, cat="user_annotation")
TWO = [
    STEP,
    launch("1704161511420316.491", 501),
    kernel("soft_knead", "1704161511420326.491", 10, 501),
    launch("1704161511420366.491", 502),
    kernel("soft_knead", "1704161511420376.491", "20", 502),
]


@pytest.mark.parametrize("before", ["", "\ufeff", "\n  "])
def test_load_bare_list_with_text_times_is_exact(tmp_path: Path, before: str) -> None:
    """What Perfetto and chrome://tracing take: a list of events, and here times as text."""
    trace = read(tmp_path, before + json.dumps(TWO))
    assert [step.duration_ns for step in analysis.steps(trace)] == [200_000]
    assert busy_and_window(trace) == (30_000, 70_000)
    assert (trace.origin_ns, trace.damaged, trace.skipped) == (1704161511420306491, False, 0)


def test_load_bare_list_that_was_cut_is_damaged(tmp_path: Path) -> None:
    trace = read(tmp_path, json.dumps(TWO)[:-30])
    assert trace.damaged
    assert len(trace) == 4


@pytest.mark.parametrize(
    "distributed",
    [
        {"rank": "2", "world_size": "8"},
        {"rank": 2.0, "world_size": 8, "nccl_version": []},
        {"rank": 2, "world_size": "many"},
    ],
)
@pytest.mark.parametrize("memory", ["80 GB", None, 1 << 36, -1])
@pytest.mark.parametrize("base", [1_000, "1000", None, "soon"])
def test_load_odd_header_field_costs_only_itself(
    tmp_path: Path, distributed: dict[str, Any], memory: Any, base: Any
) -> None:
    header = {
        "distributedInfo": distributed,
        "deviceProperties": [{"id": 0, "name": "Oven", "totalGlobalMem": memory}],
        "baseTimeNanoseconds": base,
    }
    trace = read(tmp_path, whole(*TWO, **header))
    assert trace.rank == 2
    assert trace.device_memory == (1 << 36 if memory == 1 << 36 else 0)
    assert trace.origin_ns == 1704161511420306491 + (1_000 if base in (1_000, "1000") else 0)
    assert busy_and_window(trace) == (30_000, 70_000)


def test_load_broken_header_keeps_its_whole_values(tmp_path: Path) -> None:
    text = json.dumps(whole(*TWO, note="x", distributedInfo={"rank": 3}))
    trace = read(tmp_path, text.replace('"x"', '"a "quoted" note"'))
    assert trace.rank == 3


@pytest.mark.parametrize("rank", [-1, 1 << 40, "first", True, None, [2]])
def test_load_implausible_rank_is_unknown(tmp_path: Path, rank: Any) -> None:
    assert read(tmp_path, whole(*TWO, distributedInfo={"rank": rank})).rank is None


@pytest.mark.parametrize("bare", [True, False])
def test_load_second_export_in_a_file_is_reported(tmp_path: Path, bare: bool) -> None:
    first: Any = TWO if bare else whole(*TWO)
    trace = read(tmp_path, json.dumps(first) + "\n" + json.dumps(first))
    assert busy_and_window(trace) == (30_000, 70_000)
    assert trace.reading.more_exports
    assert not read(tmp_path, first).reading.more_exports


def test_load_exporters_warnings_are_kept(tmp_path: Path) -> None:
    trace = read(tmp_path, whole(*TWO, WARNING=["CUPTI dropped 12 activity records", "x" * 900]))
    assert trace.reading.warnings == ("CUPTI dropped 12 activity records", "x" * 200)


def ascend() -> list[dict[str, Any]]:
    """Return a trace in the form of torch_npu's: no categories, kinds follow from the names of processes."""

    def named(pid: int, name: str, labels: str) -> list[dict[str, Any]]:
        return [
            {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}},
            {"ph": "M", "name": "process_labels", "pid": pid, "tid": 0, "args": {"labels": labels}},
        ]

    def task(name: str, ts: float, dur: float, kind: str) -> dict[str, Any]:
        args = {"Task Type": kind, "Stream Id": 3, "connection_id": int(ts)}
        return complete(name, f"17041615114{ts:09.3f}", dur, pid=800, tid=3, args=args)

    def at(name: str, ts: float, dur: float, pid: int, tid: int = 77) -> dict[str, Any]:
        return complete(name, f"17041615114{ts:09.3f}", dur, pid=pid, tid=tid)

    return [
        complete("aten::mm", "1704161511400000.000", 500, pid=77, tid=77, cat="cpu_op"),
        *named(77, "Python", "CPU"),
        task("aclnnMatmul_MatMulV2", 100, 40.5, "AI_CORE"),
        task("MEMCPY_ASYNC", 150, 10, "MEMCPY_ASYNC"),
        task("EVENT_WAIT", 170, 300, "EVENT_WAIT"),
        task("hcom_allReduce__503_96_4", 480, 20, "HCCL"),
        *named(800, "Ascend Hardware", "NPU"),
        at("AscendCL@aclrtLaunchKernel", 90, 5, 7702),
        *named(7702, "CANN", "CPU"),
        at("Computing", 100, 40.5, 7700, 0),
        at("Free", 140, 300, 7700, 3),
        *named(7700, "Overlap Analysis", "NPU"),
    ]


def test_load_ascend_trace_has_its_device_events(tmp_path: Path) -> None:
    trace = read(tmp_path, ascend())
    device = analysis.DeviceTime(trace).all()
    assert (device.n_gpu_events, device.compute_ns, device.memcpy_ns, device.comm_ns) == (
        3,
        40_500,
        10_000,
        20_000,
    )
    assert device.window_ns == 400_000
    assert (trace.skipped, trace.reading.uncategorised) == (0, 7)


def test_load_ascend_library_call_nests_in_its_operator(tmp_path: Path) -> None:
    rows = {row.name: row for row in analysis.operators(read(tmp_path, ascend()))}
    assert rows["aten::mm"].self_cpu_ns == 495_000


@pytest.mark.parametrize(
    ("written", "kind"),
    [
        ("Kernel", "kernel"),
        ("concurrent_kernel", "kernel"),
        ("mlu_kernel", "kernel"),
        ("hpu_op", "kernel"),
        ("mtia_ccp_events", "kernel"),
        ("Memcpy", "gpu_memcpy"),
        ("mlu_memcpy", "gpu_memcpy"),
        ("gcu_memset", "gpu_memset"),
        ("xpu_runtime", "xpu_runtime"),
        ("xpu_driver", "xpu_driver"),
        ("hip_runtime", "hip_runtime"),
        ("mtia_runtime", "mtia_runtime"),
        ("musa_runtime", "privateuse1_runtime"),
        ("gcu_driver", "privateuse1_driver"),
        ("mlu_user_annotation", "gpu_user_annotation"),
        ("user_annotation", "user_annotation"),
        ("cpu_op", "cpu_op"),
        ("cuda_sync", "cuda_sync"),
        ("Overhead", "overhead"),
    ],
)
def test_category_of_any_vendor_is_kinetos(written: str, kind: str) -> None:
    assert category(written) == kind


@pytest.mark.parametrize(
    ("hint", "kind"),
    [
        (Hint("aten::add"), "cpu_op"),
        (Hint("train.py: step"), "cpu_op"),
        (Hint("ProfilerStep#3"), "user_annotation"),
        (Hint("Optimizer.step#AdamW.step"), "user_annotation"),
        (Hint("cudaLaunchKernel"), "cuda_runtime"),
        (Hint("hipExtLaunchKernel"), "hip_runtime"),
        (Hint("zeCommandListAppendLaunchKernel"), "xpu_runtime"),
        (Hint("Memcpy HtoD (Pinned -> Device)"), "gpu_memcpy"),
        (Hint("void at::native::add_kernel<float>(float*)"), "kernel"),
        (Hint("whatever", on_stream=True), "kernel"),
        (Hint("whatever", process="python", labels="GPU 0"), "kernel"),
        (Hint("whatever", process="gpu_train", labels="CPU"), "cpu_op"),
        (Hint("whatever", thread="stream 7 "), "kernel"),
        (Hint("hcom_allReduce__1", process="HCCL", thread="Group 0"), "kernel"),
        (Hint("Notify_Wait", process="HCCL", thread="Plane 0"), "derived"),
    ],
)
def test_inferred_category_goes_by_name_and_place(hint: Hint, kind: str) -> None:
    assert inferred(hint) == kind


def test_load_without_any_category_keeps_device_time(tmp_path: Path) -> None:
    """Kineto's own trace with every ``cat`` taken out."""
    trace = read(tmp_path, whole(*({k: v for k, v in each.items() if k != "cat"} for each in TWO)))
    assert busy_and_window(trace) == (30_000, 70_000)
    assert len(analysis.steps(trace)) == 1
    assert analysis.DeviceTime(trace).linked().n_gpu_events == 2


def serial(*odd: dict[str, Any]) -> dict[str, Any]:
    events = [complete("ProfilerStep#1", 0, 400, cat="user_annotation")]
    for number, ts in enumerate((100, 200, 300)):
        events += [launch(ts, 701 + number), kernel("knead", ts + 5, 50, 701 + number)]
    return whole(*events, *odd)


def test_load_kernel_that_outlasts_the_recording_is_cut(tmp_path: Path) -> None:
    """It can have lasted 100 µs at most: the next kernel of its stream starts then."""
    trace = read(tmp_path, serial(launch(0, 700), kernel("bogus", 5, 1_000_000, 700)))
    assert busy_and_window(trace) == (250_000, 350_000)
    assert trace.reading.shortened == 1


@pytest.mark.parametrize("ts", [0, 5e9, 1.7e15])
def test_load_kernel_far_outside_is_left_out(tmp_path: Path, ts: float) -> None:
    """A start of 0 on a clock that counts from 1970 makes 53 years of idle time."""
    events = serial(launch(0, 700))["traceEvents"]
    for each in events:
        each["ts"] += 1.7e9
    trace = read(tmp_path, whole(kernel("bogus", ts, 10, 700), *events))
    assert busy_and_window(trace) == (150_000, 250_000)
    assert trace.duration_ns == 400_000
    assert trace.reading.far_away == 1
    assert trace.origin_ns == 1_700_000_000_000


def test_load_device_clock_apart_keeps_all_kernels(tmp_path: Path) -> None:
    events = [kernel(f"knead{number}", 9e9 + 10 * number, 5, number) for number in range(20)]
    trace = read(tmp_path, whole(complete("aten::add", 0, 400, cat="cpu_op"), *events))
    assert analysis.DeviceTime(trace).all().busy_ns == 100_000
    assert trace.reading.clock_apart


def test_load_host_that_runs_ahead_loses_no_kernel(tmp_path: Path) -> None:
    """The device works on for ten times as long as the recording's host events, without a break."""
    events = [kernel("knead", 1_000 * number, 1_000, number) for number in range(1, 401)]
    trace = read(tmp_path, whole(complete("aten::add", 0, 4_000, cat="cpu_op"), *events))
    assert analysis.DeviceTime(trace).all().busy_ns == 400_000_000
    assert (trace.reading.far_away, trace.reading.shortened) == (0, 0)


TRITON = b'[{"id":1,"model_name":"simple","model_version":1,"timestamps":[{"name":"REQUEST_START","ns":5}]}]'
DUMP = pickle.dumps({"version": "2.10", "pg_config": {}, "entries": []})


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("nccl_trace_rank_0", DUMP, "is a Flight Recorder dump"),
        ("trace.json", TRITON, "is a request trace of Triton Inference Server"),
        ("report.nsys-rep", b"\x00\x01", "is a report of Nsight Systems"),
        ("kernels.ncu-rep", b"NVR\x00", "is a report of Nsight Compute"),
        ("events.out.tfevents.17.host", b"\x18", "is a log of TensorBoard"),
        ("trace.json.bz2", bz2.compress(b"{}"), "is compressed with bzip2"),
        ("model.pt", b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.", "is a checkpoint of torch.save"),
        ("et.json", b'{"schema": "1.1.1-chakra.0.0.4", "nodes": [', "is an execution trace of torch"),
        (
            "prof.json",
            b'{"$schema":"https://www.speedscope.app/file-format-schema.json",',
            "is a profile for speedscope",
        ),
    ],
)
def test_foreign_file_has_its_own_sentence(
    analyze: Any, tmp_path: Path, name: str, content: bytes, what: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    code, out, err = analyze(path)
    assert (code, out) == (2, "")
    assert err.startswith(f"torchperfd: {path} {what}")
    assert err.count("\n") == 1


def test_archives_and_databases_are_named_by_content(analyze: Any, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a", "w") as archive:
        archive.writestr("model/data.pkl", b"x")
    assert "is a checkpoint of torch.save" in analyze(tmp_path / "a")[2]
    with zipfile.ZipFile(tmp_path / "b", "w") as archive:
        archive.writestr("trace.json", b"{}")
    assert "is a zip archive, no trace; extract it first" in analyze(tmp_path / "b")[2]
    with sqlite3.connect(tmp_path / "c.sqlite") as database:
        database.execute("create table a(b)")
    assert "open it with `nsys stats`" in analyze(tmp_path / "c.sqlite")[2]


@pytest.mark.parametrize("name", ["trace.json.zst", "rank0.pickle.zst"])
def test_zstd_without_a_reader_is_named(
    analyze: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, "compression.zstd", None)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    (tmp_path / name).write_bytes(b"\x28\xb5\x2f\xfd" + bytes(40))
    code, _, err = analyze(tmp_path / name)
    assert code == 1
    assert f"{tmp_path / name} is compressed with zstd, which Python reads from 3.14 on; decompress it" in err


def test_xz_trace_is_read_like_the_plain_one(analyze: Any, tmp_path: Path) -> None:
    packed = tmp_path / "trace.json.xz"
    packed.write_bytes(lzma.compress((GOLDEN / "trace_small.json").read_bytes()))
    plain = json.loads(analyze(GOLDEN / "trace_small.json", "--json")[1])
    assert json.loads(analyze(packed, "--json")[1])["ranks"][0]["operators"] == plain["ranks"][0]["operators"]


def test_directory_of_dumps_is_sent_to_stacks(analyze: Any, tmp_path: Path) -> None:
    (tmp_path / "nccl_trace_rank_0").write_bytes(DUMP)
    code, _, err = analyze(tmp_path)
    assert code == 2
    assert f"`torchperfd stacks --from {tmp_path}` names the rank" in err


def test_trace_that_has_such_words_is_still_a_trace(analyze: Any, tmp_path: Path) -> None:
    trace = (GOLDEN / "trace_small.json").read_bytes().replace(b"{", b'{"nodes": 1, "schema": 2, ', 1)
    (tmp_path / "trace.json").write_bytes(trace)
    assert analyze(tmp_path / "trace.json")[0] == 0
