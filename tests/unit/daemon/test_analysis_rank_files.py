"""Traces of several ranks: which file is of which rank, and the text on many ranks."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
from tests.support.commands import Run
from tests.unit.daemon.test_analysis_foreign import complete, kernel, launch, whole

from torchperfd_daemon import analysis
from torchperfd_daemon.errors import NoSuchTargetError, UsageError
from torchperfd_daemon.text import ranks_phrase, ranks_text


def text(rank: Any = None, *, start: int = 20, behind: bool = False) -> str:
    """Return a trace with one all-reduce that ends at 80 µs."""
    events = [
        {
            "ph": "X",
            "cat": "user_annotation",
            "name": "ProfilerStep#1",
            "pid": 9,
            "tid": 9,
            "ts": 0,
            "dur": 100,
        },
        {"ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", "pid": 0, "tid": 7}
        | {"ts": start, "dur": 80 - start, "args": {"stream": 7, "correlation": 831}},
    ]
    facts = {} if rank is None else {"distributedInfo": {"backend": "nccl", "rank": rank, "world_size": 2}}
    return json.dumps({"traceEvents": events} | facts if behind else facts | {"traceEvents": events})


def fill(directory: Path, **files: str) -> Path:
    for name, content in files.items():
        (directory / name).write_text(content)
    return directory


def ranks(*paths: Path) -> tuple[list[tuple[int | None, str]], list[str]]:
    notes: list[str] = []
    found = analysis.rank_files(list(paths), notes.append)
    return [(file.rank, file.path.name) for file in found], notes


NAMES = (
    ("host1_77.1712345678901.pt.trace.json", "host1_78.1712345678902.pt.trace.json"),
    ("rank-1.json", "rank-0.json"),
    ("b.json", "a.json"),
    ("dp0_pp0_tp1_rank7.json", "worker.json"),
)


@pytest.mark.parametrize("names", NAMES)
@pytest.mark.parametrize("behind", [False, True])
def test_rank_files_file_says_its_rank_name_does_not_count(
    tmp_path: Path, names: tuple[str, str], behind: bool
) -> None:
    for rank, name in enumerate(names):
        (tmp_path / name).write_text(text(rank, behind=behind))
    fill(tmp_path, **{"notes.txt": "no", "config.json": "{}", "events.json": "[1, 2]"})
    assert ranks(tmp_path) == ([(0, names[0]), (1, names[1])], [])


def test_rank_files_rank_as_text_and_gzip_are_read(tmp_path: Path) -> None:
    (tmp_path / "x.json.gz").write_bytes(gzip.compress(text("3").encode()))
    (tmp_path / "y.json.GZ").write_bytes(gzip.compress(text(1).encode()))
    assert ranks(tmp_path) == ([(1, "y.json.GZ"), (3, "x.json.gz")], [])


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("rank-0.json", "rank-11.json", "rank-2.json"), [0, 2, 11]),
        (("trace_rank_3.json", "trace_rank_4.json"), [3, 4]),
        (("1719041535.62-TP-0.trace.json", "1719041535.62-TP-1.trace.json"), [0, 1]),
        (("rank0.json", "rank1.json"), [0, 1]),
    ],
)
def test_rank_files_rank_in_name_counts_without_another(
    tmp_path: Path, names: tuple[str, ...], expected: list[int]
) -> None:
    found, notes = ranks(fill(tmp_path, **dict.fromkeys(names, text())))
    assert ([rank for rank, _ in found], notes) == (expected, [])


def test_rank_files_unknown_ranks_are_numbered_by_name(tmp_path: Path) -> None:
    fill(tmp_path, **{"t10.json": text(), "t9.json": text()})
    assert ranks(tmp_path) == (
        [(0, "t9.json"), (1, "t10.json")],
        ["these do not say their rank and are numbered by name: 0 = t9.json, 1 = t10.json"],
    )


def test_rank_files_unknown_rank_beside_known_ones_is_left_out(tmp_path: Path) -> None:
    fill(tmp_path, **{"t9.json": text(), "a.json": text(1), "b.json": text(0)})
    assert ranks(tmp_path) == (
        [(0, "b.json"), (1, "a.json")],
        ["left out, since others say their rank: t9.json"],
    )
    # A file that was named is never left out.
    assert ranks(tmp_path / "t9.json", tmp_path / "a.json")[0] == [(0, "t9.json"), (1, "a.json")]


def test_rank_files_newest_of_a_rank_counts(tmp_path: Path) -> None:
    fill(
        tmp_path,
        **{
            "host_9.1712345678901234567.pt.trace.json": text(0),
            "host_12.1712345678901234566.pt.trace.json": text(0),
            "host_13.1712345678901234568.pt.trace.json": text(1),
        },
    )
    found, notes = ranks(tmp_path)
    assert found == [
        (0, "host_9.1712345678901234567.pt.trace.json"),
        (1, "host_13.1712345678901234568.pt.trace.json"),
    ]
    assert notes == ["rank 0 has 2 traces; the newest counts: host_9.1712345678901234567.pt.trace.json"]


def test_rank_files_plain_file_comes_before_its_gzip(tmp_path: Path) -> None:
    fill(tmp_path, **{"t.json": text(0)})
    (tmp_path / "t.json.gz").write_bytes(gzip.compress(text(0).encode())[:40])
    assert ranks(tmp_path) == ([(0, "t.json")], [])


def test_rank_files_copies_with_ranks_in_names_go_by_names(tmp_path: Path) -> None:
    fill(tmp_path, **{f"rank{rank}.json": text(0) for rank in range(3)})
    assert ranks(tmp_path)[0] == [(0, "rank0.json"), (1, "rank1.json"), (2, "rank2.json")]


def test_rank_files_captures_folder_has_its_own_names_only(tmp_path: Path) -> None:
    fill(
        tmp_path, **{"manifest.json": "{}", "rank1.json": text(), "rank0.json": text(), "other.json": text(5)}
    )
    assert ranks(tmp_path)[0] == [(0, "rank0.json"), (1, "rank1.json")]


def test_rank_files_pipe_in_a_directory_is_left_alone(tmp_path: Path) -> None:
    fill(tmp_path, **{"a.json": text(0)})
    os.mkfifo(tmp_path / "trace.json")
    assert ranks(tmp_path) == ([(0, "a.json")], [])


def test_rank_files_directory_without_traces_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NoSuchTargetError, match="holds no trace"):
        ranks(fill(tmp_path, **{"config.json": "{}", "notes.txt": "no"}))


def test_rank_files_two_named_files_of_one_rank_are_refused(tmp_path: Path) -> None:
    fill(tmp_path, **{"a.json": text(4), "b.json": text(4)})
    with pytest.raises(UsageError, match=r"a\.json and b\.json are both of rank 4"):
        ranks(tmp_path / "a.json", tmp_path / "b.json")


def test_analyze_directory_and_list_find_the_waiting_rank(tmp_path: Path, run: Run) -> None:
    """Rank 1 comes 5 µs later: the transfer is 55 µs and rank 0 waits for 5."""
    names = ("host1_77.1712345678901.pt.trace.json", "host1_78.1712345678902.pt.trace.json")
    fill(tmp_path, **{names[0]: text(0), names[1]: text(1, start=25)})
    for arguments in ((tmp_path,), tuple(tmp_path / name for name in reversed(names))):
        code, out, err = run("analyze", "--json", *arguments)
        document = json.loads(out)
        (collective,) = document["across"]["collectives"]
        assert (code, err) == (0, "")
        assert [entry["rank"] for entry in document["ranks"]] == [0, 1]
        assert (collective["transfer_us"], collective["wait_us"]) == (55, 5)


def test_compare_ranks_of_a_directory_by_what_files_say(tmp_path: Path, run: Run) -> None:
    fill(tmp_path, **{"x.json": text(0), "y.json": text(6, start=25)})
    code, out, _ = run("compare", tmp_path, "--ranks", "0,6", "--json")
    document = json.loads(out)
    assert code == 0
    assert document["before"]["paths"] == [str(tmp_path / "x.json")]
    assert document["after"]["paths"] == [str(tmp_path / "y.json")]
    code, _, err = run("compare", tmp_path, "--ranks", "0,1")
    assert (code, err.splitlines()[0]) == (3, "torchperfd: A has no rank 1; it has 0, 6")


def test_analyze_damaged_rank_of_a_directory_is_missing(tmp_path: Path, run: Run) -> None:
    fill(tmp_path, **{"rank-0.json": text(0), "rank-1.json": ""})
    code, out, err = run("analyze", tmp_path, "--json")
    assert code == 5
    assert [entry["rank"] for entry in json.loads(out)["failed"]] == [1]
    assert "1 of 2 ranks are missing (1)" in err


def job(folder: Path, ranks: int, late: int) -> Path:
    """Write the traces of a job whose rank ``late`` launches its collectives 300 µs after the others."""
    group = {
        "Process Group Name": "0",
        "Collective name": "allreduce",
        "In msg nelems": 1000,
        "dtype": "Float",
    }
    for rank in range(ranks):
        events: list[Any] = []
        for step in range(3):
            start = 1000 * step
            arrives = start + (400 if rank == late else 100)
            events += [
                complete(f"ProfilerStep#{step}", start, 990, cat="user_annotation"),
                *(complete(f"aten::op{n}", start + n, 0.5, cat="cpu_op") for n in range(20)),
                launch(start + 30, 10 * step + 1),
                kernel("gemm", start + 40, arrives - start - 50, 10 * step + 1),
                launch(start + 50, 10 * step + 2),
                kernel(
                    "ncclDevKernel_AllReduce_Sum_f32_RING_LL", arrives, start + 600 - arrives, 10 * step + 2
                ),
            ]
            events[-1]["args"] |= group
        document = whole(*events) | {"distributedInfo": {"rank": rank, "world_size": ranks}}
        (folder / f"rank{rank}.json").write_text(json.dumps(document))
    return folder


@pytest.mark.parametrize(("ranks", "late"), [pytest.param(64, 37, marks=pytest.mark.slow), (4, 0)])
def test_text_of_many_ranks_is_short_and_leads_with_all(
    analyze: Any, tmp_path: Path, ranks: int, late: int
) -> None:
    code, out, _ = analyze(job(tmp_path, ranks, late), "--workers", 1)
    assert code == 0
    lines = out.splitlines()
    assert len(lines) <= 120
    verdict = next(n for n, line in enumerate(lines) if f"rank {late} keeps the others waiting" in line)
    page = next(n for n, line in enumerate(lines) if line.startswith(f"rank {late}: "))
    assert verdict < page
    assert lines[-1] == f"{ranks - 1} more ranks; --rank N shows rank N"
    assert ", on rank 0, 1, 2" not in out


def test_rank_option_chooses_pages(analyze: Any, tmp_path: Path) -> None:
    folder = job(tmp_path, 3, 1)
    for options in (("--rank", 0, "--rank", 2), ("--rank", 0, "--rank", 2, "--markdown")):
        _, out, _ = analyze(folder, "--workers", 1, *options)
        pages = [n for n in range(3) if f"rank {n}: {folder}" in out.replace("\\", "")]
        assert pages == [0, 2]
    code, _, err = analyze(folder, "--workers", 1, "--rank", 7)
    assert (code, err.splitlines()[-1]) == (3, "torchperfd: there is no trace of rank 7")
    _, out, _ = analyze(folder, "--workers", 1, "--json")
    assert len(json.loads(out)["ranks"]) == 3


def test_two_ranks_have_both_pages(analyze: Any, tmp_path: Path) -> None:
    _, out, _ = analyze(job(tmp_path, 2, 1), "--workers", 1)
    assert "\nrank 0: " in out
    assert "\nrank 1: " in out
    assert "more rank" not in out


def test_several_devices_come_before_their_sum(analyze: Any, tmp_path: Path) -> None:
    """One works while the other does not: together they are always busy."""
    events = [complete("aten::glue", 0, 100, cat="cpu_op")]
    for n in range(4):
        events += [launch(25 * n, n + 1), kernel("k", 25 * n, 25, n + 1, pid=n % 2)]
    path = tmp_path / "t.json"
    path.write_text(json.dumps(whole(*events)))
    _, out, _ = analyze(path)
    first = out.index("device 0: 2 events, kernels 0.050 ms, busy 0.050 ms (50.0%), idle 0.050 ms (50.0%)")
    assert (
        first < out.index("device 1: 2 events") < out.index("any busy 0.100 ms (100.0%), all idle 0.000 ms")
    )


@pytest.mark.parametrize(
    ("ranks", "of", "text"),
    [
        ([2], 8, "rank 2"),
        ([*range(37), *range(38, 64)], 64, "ranks 0-36,38-63"),
        (list(range(64)), 64, "all 64 ranks"),
        ([0], 1, "rank 0"),
        ([0, 1], 0, "ranks 0-1"),
    ],
)
def test_ranks_are_written_as_ranges(ranks: list[int], of: int, text: str) -> None:
    assert ranks_phrase(ranks, of) == text
    assert ranks_text([]) == ""
