"""``torchperfd analyze``: its text, its JSON, its words and its exit codes."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.support.golden import GOLDEN, check_golden
from tests.support.node import eventually, free_port
from tests.unit.daemon.kept import add

from torchperfd_daemon import analysis
from torchperfd_daemon.captures.catalog import Catalog
from torchperfd_daemon.errors import TorchperfdError

SMALL = GOLDEN / "trace_small.json"


def test_the_text_is_the_golden_file(analyze: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(GOLDEN)
    monkeypatch.setenv("COLUMNS", "40")
    code, out, err = analyze("trace_small.json", "--limit", "12")
    assert code == 0
    check_golden("analyze.txt", out)
    assert "…" not in out, "nothing is cut off a terminal, whatever COLUMNS says"
    assert err == "torchperfd: trace_small.json: skipped 2 broken events\n"


def test_the_json_has_one_shape_for_a_file_and_a_capture(analyze: Any, tmp_path: Path) -> None:
    for name in ("rank10.json", "rank2.json"):
        (tmp_path / name).write_bytes(SMALL.read_bytes())
    (tmp_path / "notes.txt").write_text("not a rank")
    documents = []
    for target in (SMALL, tmp_path / "rank2.json", tmp_path):
        code, out, _ = analyze(target, "--json", "--limit", "1")
        assert code == 0
        documents.append(json.loads(out))
    alone, named, capture = documents
    assert [entry["rank"] for entry in alone["ranks"]] == [None]
    assert [entry["rank"] for entry in named["ranks"]] == [2]
    assert [entry["rank"] for entry in capture["ranks"]] == [2, 10]
    assert alone.keys() == capture.keys() == {"schema", "capture", "advice", "ranks", "across", "failed"}
    assert alone["schema"] == "torchperfd.analysis/1"

    entry = alone["ranks"][0]
    assert entry["trace"] == {
        "path": str(SMALL),
        "bytes": SMALL.stat().st_size,
        "events": 45,
        "skipped": 2,
        "damaged": False,
        "damaged_at": None,
        "duration_us": 3000.0,
        "device_names": ["Example GPU"],
    }
    assert [(step["index"], step["start_us"], step["duration_us"]) for step in entry["steps"]] == [
        (7, 50.125, 1000.875),
        (8, 1250.251, 1501.312),
    ]
    assert entry["breakdown"]["all"] == {
        "n_gpu_events": 6,
        "window_us": 1710.626,
        "busy_us": 528.847,
        "idle_us": 1181.779,
        "compute_us": 486.833,
        "comm_us": 0.0,
        "memcpy_us": 42.014,
        "exposed_comm_us": 0.0,
        "exposed_memcpy_us": 42.014,
        "overlap_us": 0.0,
        "comm_comp_overlap_pct": 0.0,
    }
    assert entry["breakdown"]["linked"]["n_gpu_events"] == 2
    assert entry["kernels"] == [
        {
            "name": "void gemm<float, 128, 64>(float const*)",
            "sum_us": 486.833,
            "calls": 4,
            "mean_us": 486.833 / 4,
        }
    ]
    assert len(entry["operators"]) > 1
    assert entry["operators"][0]["name"] == "ProfilerStep*"
    assert sum(row["self_cpu_share"] for row in entry["operators"]) == pytest.approx(1)


@pytest.mark.parametrize(
    ("order", "column"), [("self", "self_cpu_us"), ("total", "total_cpu_us"), ("calls", "calls")]
)
def test_the_order_is_the_asked_one(analyze: Any, order: str, column: str) -> None:
    _, out, _ = analyze(SMALL, "--json", "--sort-by", order)
    values = [row[column] for row in json.loads(out)["ranks"][0]["operators"]]
    assert values == sorted(values, reverse=True)


def test_a_capture_shows_each_rank_and_names_the_missing_one(analyze: Any, tmp_path: Path) -> None:
    (tmp_path / "rank0.json").write_bytes(SMALL.read_bytes())
    (tmp_path / "rank1.json").write_text("")
    code, out, err = analyze(tmp_path)
    assert code == 5
    assert out.startswith("rank 0: ")
    assert err.splitlines()[-1].startswith("torchperfd: 1 of 2 ranks are missing (1): ")
    assert json.loads(analyze(tmp_path, "--json")[1])["failed"][0]["rank"] == 1


def test_a_plain_trace_is_preferred_while_it_is_being_compressed(analyze: Any, tmp_path: Path) -> None:
    (tmp_path / "rank0.json").write_bytes(SMALL.read_bytes())
    (tmp_path / "rank0.json.gz").write_bytes(b"\x1f\x8b")
    code, out, _ = analyze(tmp_path, "--json")
    assert code == 0
    assert [Path(entry["trace"]["path"]).name for entry in json.loads(out)["ranks"]] == ["rank0.json"]


def test_a_cut_trace_is_analysed_with_a_warning(analyze: Any, tmp_path: Path) -> None:
    file = tmp_path / "cut.json"
    file.write_bytes(SMALL.read_bytes()[:4000])
    code, out, err = analyze(file)
    assert code == 0
    assert "ProfilerStep*" in out
    assert err.count("\n") == 1
    assert "is cut off or damaged at byte 4,000 of its text" in err


def test_names_from_a_trace_cannot_drive_the_terminal(analyze: Any, tmp_path: Path) -> None:
    name = "\x1b]0;owned\x07 [bold]x[/bold] \n\u202e:smile:"
    event = {"ph": "X", "cat": "cpu_op", "name": name, "ts": 1, "dur": 1000}
    file = tmp_path / "t.json"
    file.write_text(json.dumps({"traceEvents": [event]}))
    code, out, _ = analyze(file)
    assert code == 0
    assert "?]0;owned? [bold]x[/bold] ??:smile:" in out


@pytest.mark.parametrize(
    ("content", "code", "said"),
    [(None, 3, "there is no trace at"), (b"", 1, "is empty"), (b"not json", 1, "not a PyTorch trace")],
)
def test_errors_are_one_line_with_their_code(
    analyze: Any, tmp_path: Path, content: bytes | None, code: int, said: str
) -> None:
    file = tmp_path / "t.json"
    if content is not None:
        file.write_bytes(content)
    got, out, err = analyze(file)
    assert got == code
    assert out == ""
    assert err.startswith("torchperfd: ")
    assert err.count("\n") == 1
    assert said in err


def test_a_capture_is_found_by_its_id(analyze: Any, tmp_path: Path) -> None:
    capture = tmp_path / "20260101-120000-abcd"
    capture.mkdir()
    (capture / "rank0.json").write_bytes(SMALL.read_bytes())
    code, out, _ = analyze(capture.name, "--captures-dir", tmp_path)
    assert code == 0
    assert out.startswith("rank 0: ")
    code, _, err = analyze("19990101-000000-none", "--captures-dir", tmp_path)
    assert (code, err) == (3, "torchperfd: there is no trace at 19990101-000000-none\n")


@pytest.mark.parametrize(
    ("group", "key"), [("shape", "input_shapes"), ("stack", "stack"), ("module", "module")]
)
def test_a_grouped_table_says_what_it_is_grouped_by(analyze: Any, group: str, key: str) -> None:
    code, out, _ = analyze(SMALL, "--json", "--group-by", group)
    (entry,) = json.loads(out)["ranks"]
    assert code == 0
    assert entry["group_by"] == group
    assert all(key in row for row in entry["operators"])


def test_memory_is_shown_when_it_is_sorted_by(analyze: Any) -> None:
    _, out, _ = analyze(SMALL, "--sort-by", "cpu_memory_usage")
    assert "total CPU ms   self CPU MB   self GPU MB" in out


def test_a_bad_pattern_is_a_usage_error(analyze: Any) -> None:
    code, out, err = analyze(SMALL, "--comm-pattern", "(")
    assert (code, out) == (2, "")
    assert err.startswith("torchperfd: '(' is no regular expression")


def test_a_worker_without_enough_memory_costs_only_its_rank() -> None:
    file = analysis.RankFile(0, SMALL)
    (answer,) = analysis.analyse([file], analysis.Request(nice=1, max_memory=1 << 20))
    assert isinstance(answer, TorchperfdError)
    (answer,) = analysis.analyse([file], analysis.Request(nice=1, max_memory=1 << 30))
    assert isinstance(answer, analysis.Summary)


def test_worker_memory_that_is_too_little_names_the_rank(analyze: Any, tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"rank{rank}.json").write_bytes(SMALL.read_bytes())
    code, out, err = analyze(tmp_path / "rank0.json", "--worker-memory", "1MiB")
    assert (code, out) == (1, "")
    assert "rank0.json does not fit into the memory allowed" in err
    assert analyze(tmp_path, "--json", "--worker-memory", "2GiB")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("http://host/x",), "is no URL of an object store"),
        ((SMALL, "--dask", "host"), "is no address of a Dask scheduler"),
        ((SMALL, "--dask", "tcp://h:1", "--workers", "2"), "--workers is for processes of this machine"),
    ],
)
def test_address_that_is_none_is_a_usage_error(analyze: Any, arguments: tuple[Any, ...], said: str) -> None:
    code, out, err = analyze(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err


def test_scheduler_that_gets_no_worker_is_an_error(analyze: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("distributed")
    monkeypatch.setattr("torchperfd_cli.commands._rank_workers.FIRST_WORKER_S", 1)
    address = f"tcp://127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "distributed.cli.dask_scheduler", "--host", address]
    process = subprocess.Popen([*command, "--no-dashboard", "--no-jupyter"], stderr=subprocess.DEVNULL)
    try:
        code, out, err = analyze(SMALL, "--dask", address)
    finally:
        process.kill()
        process.wait(30)
    assert (code, out) == (4, "")
    assert f"{address} has had no worker for 1 s; start one with `dask worker {address}`" in err


def test_worker_killed_once_costs_a_retry(tmp_path: Path) -> None:
    """A pipe holds the worker until it is killed; the next one reads the trace from it."""
    pipe = tmp_path / "rank0.json"
    os.mkfifo(pipe)

    def workers() -> list[psutil.Process]:
        """Return the process that reads a rank; its parent has forked it."""
        return [each for child in psutil.Process().children() for each in child.children()]

    with ThreadPoolExecutor(1) as pool:
        request = analysis.Request(max_memory=1 << 30)
        found = pool.submit(lambda: next(analysis.analyse([analysis.RankFile(0, pipe)], request)))
        eventually(workers, 30)
        killed = workers()[0]
        killed.kill()
        killed.wait(30)  # only then is it no reader of the pipe
        pipe.write_bytes(SMALL.read_bytes())
        answer = found.result(60)
    assert isinstance(answer, analysis.Summary)
    assert killed.pid not in [each.pid for each in workers()]


def test_lost_rank_that_the_manifest_names_is_missing(analyze: Any, catalog: Catalog) -> None:
    add(catalog, "half", {rank: SMALL.read_bytes() for rank in range(2)})
    (catalog.directory / "half" / "rank1.json").unlink()
    code, out, err = analyze("half", "--captures-dir", catalog.directory, "--json")
    assert code == 5
    assert [entry["rank"] for entry in json.loads(out)["failed"]] == [1]
    assert "1 of 2 ranks are missing (1): there is no trace at" in err


def test_a_directory_without_ranks_is_no_capture(analyze: Any, tmp_path: Path) -> None:
    code, out, err = analyze(tmp_path)
    assert (code, out) == (3, "")
    assert "holds no trace (.json or .json.gz)" in err


def test_a_directory_that_cannot_be_listed_is_one_line(
    analyze: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refuse)
    assert analyze(tmp_path) == (1, "", f"torchperfd: cannot read {tmp_path}: Permission denied\n")
