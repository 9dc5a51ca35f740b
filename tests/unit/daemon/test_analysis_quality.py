"""What is said of a trace's quality, and files of several processes and devices."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.daemon.test_analysis_foreign import complete, kernel, launch, serial, whole
from tests.unit.daemon.traces import event, trace_of

from torchperfd_cli import main
from torchperfd_daemon import analysis
from torchperfd_daemon.analysis.trace_repair import overlaps


def quality(*events: str) -> analysis.Quality:
    return analysis.summarise(trace_of(events)).quality


def analyzed(capfd: pytest.CaptureFixture[str], file: Path, content: Any) -> tuple[dict[str, Any], str]:
    """Return the document of ``torchperfd analyze``, and what it says on stderr."""
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    code = main.run_command(["analyze", str(file), "--json", "--with-text"])
    captured = capfd.readouterr()
    assert code == 0
    return json.loads(captured.out), captured.err


def test_quality_sound_trace_has_nothing_to_say() -> None:
    ids = {"correlation": 5}
    found = quality(
        event("aten::mm", 0, 90),
        event("cudaLaunchKernel", 10, 20, cat="cuda_runtime", args=ids),
        event("sgemm", 30, 60, cat="kernel", thread=7, args=ids),
        event("cudaDeviceSynchronize", 20, 30, cat="cuda_runtime", args={"correlation": 6}),
    )
    assert analysis.quality_lines(found) == []
    assert (found.launches, found.devices, found.processes) == (1, 1, ("1",))


def test_quality_launches_without_any_kernel_are_counted() -> None:
    """A recording whose device events were lost: GPU times are missing and not zero."""
    found = quality(
        event("aten::mm", 0, 90),
        *(
            event("cudaLaunchKernel", at, at + 1, cat="cuda_runtime", args={"correlation": at})
            for at in (1, 2, 3)
        ),
        event("cudaGetDevice", 20, 21, cat="cuda_runtime", args={"correlation": 9}),
    )
    assert (found.launches, found.launches_without_kernels) == (3, 3)
    (line,) = analysis.quality_lines(found)
    assert line.startswith("launches without kernels: 3 of 3; there is no device event at all")


def test_quality_kernels_without_launches_are_counted() -> None:
    found = quality(
        event("cudaLaunchKernel", 1, 2, cat="cuda_runtime", args={"correlation": 1}),
        event("a", 10, 20, cat="kernel", thread=7, args={"correlation": 1}),
        event("b", 20, 30, cat="kernel", thread=7, args={"correlation": 2}),
    )
    assert (found.launches_without_kernels, found.kernels_without_launches) == (0, 1)


def test_overlaps_are_those_of_one_stream() -> None:
    found = quality(
        event("a", 0, 100, cat="kernel", thread=7),
        event("b", 10, 30, cat="kernel", thread=7),
        event("c", 90, 120, cat="kernel", thread=7),
        event("d", 50, 60, cat="kernel", thread=8),
        event("e", 120, 130, cat="kernel", thread=7),
    )
    assert (found.overlaps, found.overlap_ns) == (2, 20 + 10)
    none = np.zeros(0, dtype=np.int64)
    assert overlaps(none, none, none.astype(np.int32)).events == 0


def test_analyze_impossible_times_are_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    document, err = analyzed(
        capfd, tmp_path / "t.json", serial(launch(0, 700), kernel("bogus", 5, 1_000_000, 700))
    )
    assert "has impossible device times" in err
    (rank,) = document["ranks"]
    assert rank["breakdown"]["all"]["busy_us"] == 250
    assert rank["quality"]["impossible_times"]["shortened"] == 1
    assert "said to outlast the recording" in document["text"]


def test_analyze_second_export_and_warnings_are_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    one = json.dumps(whole(kernel("knead", 0, 10, 1), WARNING=["dropped 12 records\x1b[2J"]))
    document, err = analyzed(capfd, tmp_path / "t.json", one + one)
    assert "holds another trace after the first" in err
    assert "the file holds another trace after this one" in document["text"]
    assert "the exporter says: dropped 12 records?[2J" in document["text"]
    assert document["ranks"][0]["quality"]["more_exports"]


def merged(second_device: int = 1) -> dict[str, Any]:
    """Return a file of two ranks that count steps, correlation and external ids alike."""

    def rank(pid: int, device: int, step: int, start: int, busy: int) -> list[dict[str, Any]]:
        operator = complete("aten::glue", 10, 20, pid=pid, tid=pid, cat="cpu_op", args={"External id": 1})
        return [
            complete("ProfilerStep#5", start, step, pid=pid, tid=pid, cat="user_annotation"),
            operator,
            launch(15, 1, pid=pid),
            kernel("soft_knead", 30, busy, 1, pid=device),
        ]

    return whole(*rank(500, 0, 100, 0, 10), *rank(501, second_device, 150, 7, 40))


@pytest.mark.parametrize("second_device", [0, 1])
def test_analyze_processes_of_one_file_are_kept_apart(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], second_device: int
) -> None:
    document, err = analyzed(capfd, tmp_path / "t.json", merged(second_device))
    assert "holds 2 processes, each analysed by itself" in err
    found = {
        rank["process"]: (
            [step["duration_us"] for step in rank["steps"]],
            rank["breakdown"]["all"]["busy_us"],
            {row["name"]: row["self_device_us"] for row in rank["operators"]}["aten::glue"],
        )
        for rank in document["ranks"]
    }
    assert found == {"500": ([100], 10, 10), "501": ([150], 40, 40)}
    assert all(rank["quality"]["processes"] == ["500", "501"] for rank in document["ranks"])


def test_analyze_stray_process_does_not_split_the_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    content = serial()
    content["traceEvents"].append(complete("note", 5, 1, pid=9, tid=9, cat="user_annotation"))
    document, _ = analyzed(capfd, tmp_path / "t.json", content)
    (rank,) = document["ranks"]
    assert (rank["process"], rank["breakdown"]["all"]["busy_us"]) == (None, 150)
    assert rank["quality"]["processes"] == ["4100", "9"]


def test_analyze_devices_of_one_process_have_their_own_times(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    events = [complete("aten::glue", 0, 100, cat="cpu_op")]
    for number, (device, start, busy) in enumerate(((0, 10, 10), (1, 15, 40), (1, 60, 5))):
        events += [launch(number, number), kernel("knead", start, busy, number, pid=device)]
    document, _ = analyzed(capfd, tmp_path / "t.json", whole(*events))
    (rank,) = document["ranks"]
    assert [(each["device"], each["kernel_us"]) for each in rank["devices"]] == [("0", 10), ("1", 45)]
    assert rank["breakdown"]["all"]["busy_us"] == 50
    assert rank["quality"]["overlaps"] == 0
    assert "device 1: 2 events, kernels 0.045 ms" in document["text"]
