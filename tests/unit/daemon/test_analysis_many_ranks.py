"""The text of many ranks: the ranks together first, then one of them, in few lines."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.unit.daemon.test_analysis_foreign import complete, kernel, launch, whole

from torchperfd_cli import main
from torchperfd_daemon.text import ranks_phrase, ranks_text


@pytest.fixture
def analyze(capfd: pytest.CaptureFixture[str]) -> Any:
    """Run the command; return exit code, stdout and stderr."""

    def run(*arguments: Any) -> tuple[int, str, str]:
        code = main.run_command(["analyze", *map(str, arguments)])
        captured = capfd.readouterr()
        return code, captured.out, captured.err

    return run


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
