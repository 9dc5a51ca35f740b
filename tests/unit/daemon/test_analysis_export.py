"""What other programs take: Markdown and CSV as golden files, and pandas, present and absent."""

import csv
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.commands import Run
from tests.support.golden import GOLDEN, check_golden

from torchperfd.document.markup import render_csv, render_markdown
from torchperfd_daemon import analysis
from torchperfd_daemon.errors import TorchperfdError

SMALL = "trace_small.json"


@pytest.fixture
def analyze(analyze: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command beside the golden trace."""
    monkeypatch.chdir(GOLDEN)
    return analyze


def summary() -> analysis.Summary:
    return analysis.summarise(analysis.load(GOLDEN / SMALL), samples=True)


@pytest.mark.parametrize(
    ("arguments", "golden"), [(("--markdown", "--limit", "12"), "analyze.md"), (("--csv",), "analyze.csv")]
)
def test_the_answer_is_the_golden_file(analyze: Run, arguments: tuple[str, ...], golden: str) -> None:
    code, out, _ = analyze(SMALL, *arguments)
    assert code == 0
    check_golden(golden, out)


def test_csv_has_every_row_of_every_rank_in_the_asked_order(analyze: Run, tmp_path: Path) -> None:
    for rank in (0, 3):
        (tmp_path / f"rank{rank}.json").write_bytes((GOLDEN / SMALL).read_bytes())
    arguments = (str(tmp_path), "--sort-by", "calls", "--limit", "1", "--group-by", "module")
    rows = list(csv.DictReader(io.StringIO(analyze(*arguments, "--csv")[1])))
    ranks = json.loads(analyze(*arguments, "--json")[1])["ranks"]
    expected = [{"rank": entry["rank"], **row} for entry in ranks for row in entry["operators"]]
    assert [row["rank"] for row in rows] == ["0"] * (len(rows) // 2) + ["3"] * (len(rows) // 2)
    assert [{key: str(value) for key, value in row.items()} for row in expected] == rows


def test_markdown_shows_each_rank(analyze: Run, tmp_path: Path) -> None:
    for rank in (0, 3):
        (tmp_path / f"rank{rank}.json").write_bytes((GOLDEN / SMALL).read_bytes())
    out = analyze(str(tmp_path), "--markdown")[1]
    ranks = [line.split(":")[0] for line in out.splitlines() if line.startswith("**rank")]
    assert ranks == ["**rank 0", "**rank 3"]
    assert "**across ranks**" in out.splitlines()


def test_a_block_of_code_cannot_be_closed_from_within() -> None:
    advice = analysis.Advice("rule", "seen *here*", 2e6, 0.25, "change a_b", "x = '````'\n\x1b[2J```", (0, 2))
    page = render_markdown(analysis.advice_document([advice]))
    assert page.splitlines() == [
        "**Advice**",
        "",
        r"1. **change a\_b**: saves 2 ms a step (25%), on ranks 0,2",
        "",
        r"   seen \*here\*",
        "",
        "   `````",
        "   x = '````'",
        "   ?[2J```",
        "   `````",
    ]


def test_a_stack_is_one_cell() -> None:
    trace = analysis.load(GOLDEN / SMALL)
    table = render_csv(analysis.csv_document([(None, analysis.summarise(trace, group_by="stack"))]))
    stacks = {row["stack"] for row in csv.DictReader(io.StringIO(table))}
    assert stacks == {"", "train.py(12): main"}


def test_two_answers_at_once_are_a_usage_error(analyze: Run) -> None:
    code, out, err = analyze(SMALL, "--json", "--csv")
    assert (code, out) == (2, "")
    assert err == "torchperfd: --json, --markdown and --csv are three answers; ask for one of them\n"


def test_tables_of_a_summary_are_frames() -> None:
    pytest.importorskip("pandas")
    result = summary()
    document = analysis.to_dict(result, None)
    operators = analysis.to_pandas(result)
    assert operators.to_dict("records") == document["operators"]
    assert analysis.to_pandas(result, "kernels").to_dict("records") == document["kernels"]
    steps = analysis.to_pandas(result, "steps")
    assert steps["duration_us"].tolist() == [step.duration_ns / 1000 for step in result.steps]
    assert steps["breakdown.idle_us"].tolist() == [step["breakdown"]["idle_us"] for step in document["steps"]]


def test_tables_of_a_comparison_are_frames() -> None:
    pytest.importorskip("pandas")
    comparison = analysis.compare([summary()], [summary()])
    document = analysis.comparison_to_dict(comparison)
    tables: tuple[analysis.ComparedTable, ...] = ("operators", "kernels", "memory")
    for table in tables:
        frame = analysis.to_pandas(comparison, table)
        assert frame["name"].tolist() == [row["name"] for row in document[table]]
        assert set(frame["status"]) == {"same"}
    assert "before_bytes" in analysis.to_pandas(comparison, "memory")


@pytest.mark.parametrize("result", [summary, lambda: analysis.compare([summary()], [summary()])])
def test_without_pandas_there_is_one_line(monkeypatch: pytest.MonkeyPatch, result: Callable[[], Any]) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(TorchperfdError, match=r"^pandas is not installed; pip install pandas$"):
        analysis.to_pandas(result())
