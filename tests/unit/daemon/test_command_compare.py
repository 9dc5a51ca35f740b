"""``torchperfd compare``: its text, Markdown and JSON, its ranks, its exit codes, and real traces."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.commands import Run, runner
from tests.support.golden import check_golden
from tests.unit.daemon import traces


@pytest.fixture
def compare(capfd: pytest.CaptureFixture[str]) -> Run:
    return runner(capfd, "compare")


def write(file: Path, lengths: Sequence[int], extra: str) -> Path:
    """Write a trace: a step for each length, in which a kernel, an operator and ``extra`` run."""
    text, at = [], 1
    for number, length in enumerate(lengths):
        linked = {"External id": number + 1}
        text += [
            traces.event(f"ProfilerStep#{number}", at, at + length + 600_000, cat="user_annotation"),
            traces.event("aten::mm", at + 1000, at + length, args=linked),
            traces.event("void gemm<float>()", at + 2000, at + length, cat="kernel", thread=7, args=linked),
            traces.event(extra, at + length, at + length + 200_000),
            traces.event("Optimizer.step#SGD.step", at + length + 300_000, at + length + 500_000),
        ]
        start = traces.microseconds(traces.ORIGIN_NS + at + 1000)
        args = f'{{"Bytes": {length}, "Device Type": 1}}'
        text.append(f'{{"ph": "i", "name": "[memory]", "pid": 1, "tid": 1, "ts": {start}, "args": {args}}}')
        at += length + 600_000
    file.write_text(traces.document(text))
    return file


SLOW, FAST = (3_000_000, 3_010_000, 2_990_000), (2_000_000, 2_010_000, 2_005_000, 1_995_000)


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Two traces, named as from the directory they lie in."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "fast.json", FAST, "aten::relu")
    write(tmp_path / "slow.json", SLOW, "aten::gelu")
    return Path("fast.json"), Path("slow.json")


@pytest.mark.parametrize(("option", "golden"), [((), "compare.txt"), (("--markdown",), "compare.md")])
def test_the_answer_is_the_golden_file(
    compare: Run, two: tuple[Path, Path], option: tuple[str, ...], golden: str
) -> None:
    code, out, err = compare(*two, *option)
    assert (code, err) == (0, "")
    check_golden(golden, out)


def test_document_has_every_row_and_the_test_used(compare: Run, two: tuple[Path, Path]) -> None:
    document = json.loads(compare(*two, "--json", "--limit", "1")[1])
    assert document["schema"] == "torchperfd.comparison/1"
    assert document["headline"].startswith("B's steps take 3.6 ms, A's 2.6 ms (+38 %): +998 µs in void gemm")
    assert (document["per"], document["noise_known"], document["level"]) == ("step", True, 0.05)
    before = {"paths": ["fast.json"], "steps": 4, "device_names": [], "capture": None}
    assert (document["before"], document["notes"], document["failed"]) == (before, [], [])
    assert (document["step"]["before_us"], document["step"]["after_us"]) == (2602.5, 3600.0)
    status = {row["name"]: row["status"] for row in document["operators"]}
    assert status == {
        "aten::mm": "changed",
        "aten::relu": "gone",
        "aten::gelu": "new",
        "ProfilerStep*": "same",
        "Optimizer.step#SGD.step": "same",
    }
    (kernel,) = document["kernels"]
    assert kernel["difference_us"] == pytest.approx(997.5)
    assert (kernel["calls_before"], kernel["calls_after"]) == (1, 1)
    assert {row["name"] for row in document["device"]} == {"busy", "compute", "idle"}
    assert {row["name"] for row in document["memory"]} == {"device_allocated", "device_peak"}
    assert document["memory"][0].keys() >= {"before_bytes", "after_bytes"}
    assert document["ranks"] == []


@pytest.mark.parametrize(("order", "column"), [("before", "before_us"), ("after", "after_us")])
def test_the_order_is_the_asked_one(compare: Run, two: tuple[Path, Path], order: str, column: str) -> None:
    document = json.loads(compare(*two, "--json", "--sort-by", order)[1])
    values = [row[column] for row in document["operators"]]
    assert values == sorted(values, reverse=True)


def test_new_rows_come_first_by_percent(compare: Run, two: tuple[Path, Path]) -> None:
    document = json.loads(compare(*two, "--json", "--sort-by", "percent")[1])
    assert document["operators"][0]["name"] == "aten::gelu"
    assert document["operators"][0]["difference_pct"] is None


def test_the_ranks_of_two_captures_are_paired(compare: Run, tmp_path: Path) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir()
    after.mkdir()
    for rank in (0, 2, 3):
        write(before / f"rank{rank}.json", FAST, "aten::relu")
    for rank, lengths in ((0, FAST), (1, FAST), (2, SLOW)):
        write(after / f"rank{rank}.json", lengths, "aten::relu")
    code, out, err = compare(before, after, "--json")
    assert (code, err) == (0, "torchperfd: left out, on one side only: rank 1, 3\n")
    document = json.loads(out)
    assert [(row["rank"], row["status"]) for row in document["ranks"]] == [(0, "same"), (2, "changed")]
    assert document["before"]["paths"] == [str(before / f"rank{rank}.json") for rank in (0, 2)]
    # The mean of both ranks over the three steps that the slow one has.
    assert document["step"]["after_us"] == pytest.approx((2605 + 3600) / 2)

    (after / "rank2.json").write_text("")
    code, out, err = compare(before, after, "--json")
    assert code == 5
    document = json.loads(out)
    assert document["ranks"] == []
    assert document["notes"] == ["left out, on one side only: rank 1, 3"]
    assert [(each["rank"], "rank2.json" in each["error"]) for each in document["failed"]] == [(2, True)]
    assert err.splitlines()[-1].startswith("torchperfd: 1 of 2 ranks are missing: ")


def test_two_ranks_of_one_capture(compare: Run, tmp_path: Path) -> None:
    for rank, lengths in ((0, FAST), (3, SLOW), (11, FAST)):
        write(tmp_path / f"rank{rank}.json", lengths, "aten::relu")
    code, out, _ = compare(tmp_path, "--ranks", "0, 3", "--json")
    document = json.loads(out)
    assert code == 0
    assert document["before"]["paths"] == [str(tmp_path / "rank0.json")]
    assert document["after"]["paths"] == [str(tmp_path / "rank3.json")]
    assert document["step"]["status"] == "changed"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["."], 2, "name a B, or two --ranks of A"),
        ([".", "b.json", "--ranks", "0,1"], 2, "name a B, or two --ranks of A"),
        ([".", "--ranks", "0"], 2, "write --ranks 0,3"),
        ([".", "--ranks", "0,x"], 2, "write --ranks 0,3"),
        ([".", "--ranks", "0,7"], 3, "A has no rank 7; it has 0, 1"),
        (["a.json", "--ranks", "0,1"], 3, "it has one trace only"),
        (["a.json", "none.json"], 3, "there is no trace at none.json"),
        (["a.json", "."], 2, "have no rank in common"),
        (["a.json", "a.json", "--json", "--markdown"], 2, "leave one out"),
        (["a.json", "bad.json"], 1, "not a PyTorch trace"),
    ],
)
def test_what_cannot_be_meant_is_one_line(
    compare: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("rank0.json", "rank1.json", "a.json"):
        write(tmp_path / name, FAST, "aten::relu")
    Path("bad.json").write_text("no trace")
    got, out, err = compare(*arguments)
    assert (got, out) == (code, "")
    assert err.startswith("torchperfd: ")
    assert err.count("\n") == 1
    assert said in err


def test_names_from_a_trace_cannot_drive_the_terminal(compare: Run, tmp_path: Path) -> None:
    write(tmp_path / "a.json", FAST, "aten::relu")
    write(tmp_path / "b.json", SLOW, "\x1b]0;owned\x07 [bold]x[/bold] \u202e|")
    _, out, _ = compare(tmp_path / "a.json", tmp_path / "b.json")
    assert "?]0;owned? [bold]x[/bold] ?|" in out
    _, out, _ = compare(tmp_path / "a.json", tmp_path / "b.json", "--markdown")
    assert "?\\]0;owned? \\[bold\\]x\\[/bold\\] ?\\|" in out


def train(file: Path, activation: type[torch.nn.Module], width: int) -> None:
    """Write the trace of a few steps of a small model."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, width), activation(), torch.nn.Linear(width, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs, targets = torch.randn(128, 64), torch.randint(0, 8, (128,))

    def step() -> None:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    step()
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=6)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(
        activities=activities,
        schedule=schedule,
        profile_memory=True,
        acc_events=True,
        on_trace_ready=lambda done: done.export_chrome_trace(str(file)),
    ) as profiler:
        for _ in range(7):
            step()
            profiler.step()


def test_two_versions_of_a_model(compare: Run, tmp_path: Path) -> None:
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    train(before, torch.nn.ReLU, 64)
    train(after, torch.nn.GELU, 2048)
    document = json.loads(compare(before, after, "--json")[1])
    operators: dict[str, Any] = {row["name"]: row for row in document["operators"]}
    assert (document["before"]["steps"], document["after"]["steps"]) == (6, 6)
    assert {operators["aten::relu"]["status"], operators["aten::threshold_backward"]["status"]} == {"gone"}
    assert {operators["aten::gelu"]["status"], operators["aten::gelu_backward"]["status"]} == {"new"}
    assert (operators["aten::addmm"]["calls_before"], operators["aten::addmm"]["calls_after"]) == (2, 2)
    memory = {row["name"]: row for row in document["memory"]}
    # Hidden activations alone: 128 rows of so many more floats.
    assert memory["host_allocated"]["difference_bytes"] > 128 * (2048 - 64) * 4
    assert memory["host_allocated"]["status"] == "changed"
    # On one thread, self times are the step; what does not add up is what began before a step.
    total = sum(row["difference_us"] for row in document["operators"])
    assert total == pytest.approx(document["step"]["difference_us"], rel=0.02)
