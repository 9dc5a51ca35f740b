"""Tables of traces, snapshots and runs fit a terminal: names are shortened, and numbers are whole."""

import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tests.support.golden import GOLDEN
from tests.support.terminal import Stdout, plain
from tests.support.wide_files import write_wide_files

from torchperfd.v1 import control_pb2
from torchperfd_cli import main
from torchperfd_cli.commands import diagnose
from torchperfd_cli.commands._capture_progress import conclude
from torchperfd_daemon.diagnosis.verdict import Cause

# A number with three decimals, as tables have it.
NUMBER = re.compile(r"(?<![\w.,])\d[\d,]*\.\d{3}(?![\w.,]*\w)")
COMMANDS = [
    ("analyze", "before.json"),
    ("analyze", "before.json", "--sort-by", "cpu_memory_usage"),
    ("analyze", "ranks"),
    ("analyze", "memory.pickle"),
    ("compare", "before.json", "after.json"),
    ("compare", "ranks", "--ranks", "0,1"),
    ("compare", "a.json", "b.json"),
]
Render = Callable[[Sequence[str], int | None], str]


@pytest.fixture
def render(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Render:
    """Run a command on a terminal of so many columns, or in a pipe; return what it shows."""
    write_wide_files(tmp_path)
    (tmp_path / "small.json").write_bytes((GOLDEN / "trace_small.json").read_bytes())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHPERFD_CAPTURES_DIR", str(tmp_path / "captures"))
    monkeypatch.setenv("TORCHPERFD_RUNS_DIR", str(tmp_path / "runs"))
    monkeypatch.setenv("TERM", "xterm")

    def call(arguments: Sequence[str], columns: int | None) -> str:
        out = Stdout(columns is not None)
        with monkeypatch.context() as context:
            context.setenv("COLUMNS", str(columns or 40))
            context.setattr(sys, "stdout", out)
            assert main.run_command(list(arguments)) == 0
        return plain(out.getvalue())

    return call


def widest(text: str) -> int:
    return max(map(len, text.splitlines()))


def words(text: str) -> Counter[str]:
    return Counter(text.replace("─", " ").split())


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_tables_fit_80_columns_and_keep_numbers(render: Render, command: Sequence[str]) -> None:
    shown, piped = render(command, 80), render(command, None)
    assert [line for line in shown.splitlines() if len(line) > 80] == []
    assert Counter(NUMBER.findall(shown)) == Counter(NUMBER.findall(piped))
    assert "…" not in piped
    assert widest(piped) > 80


@pytest.mark.parametrize("columns", [120, 200])
@pytest.mark.parametrize(
    "command", [("analyze", "small.json"), ("analyze", "memory.pickle"), ("compare", "a.json", "b.json")]
)
def test_tables_of_wide_terminals_are_not_shortened(
    render: Render, command: Sequence[str], columns: int
) -> None:
    shown = render(command, columns)
    assert "…" not in shown
    assert widest(shown) <= columns
    assert words(shown) == words(render(command, None))


def test_markdown_and_csv_are_whole_on_a_terminal(render: Render) -> None:
    for option in ("--markdown", "--csv", "--json"):
        command = ("analyze", "before.json", option)
        assert render(command, 80) == render(command, None)


@pytest.mark.parametrize("cause", Cause)
def test_explain_folds_paragraphs_as_a_whole(render: Render, cause: Cause) -> None:
    shown, piped = render(["explain", cause.slug], 80), render(["explain", cause.slug], None)
    assert piped == f"{diagnose.page_text(cause.slug)}\n"
    assert shown.split() == piped.split()
    assert widest(shown) <= 80
    assert shown.count("\n\n") == piped.count("\n\n")
    assert re.findall(r"(?m)^ *(?:- |\d+\. )", shown) == re.findall(r"(?m)^ *(?:- |\d+\. )", piped)


def test_capture_outcome_folds_all_but_paths(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    directory = f"{tmp_path}/.local/state/torchperfd/captures/20261127-165610-645ff7/of-everyone"
    Path(directory).mkdir(parents=True)
    message = control_pb2.CaptureProgress(
        capture_id="20261127-165610-645ff7",
        state=control_pb2.CAPTURE_STATE_COMPLETE,
        directory=directory,
        start_step=5,
        steps=5,
        ranks=[control_pb2.CaptureRank(rank=3, file="rank3.json", pause_seconds=7.5, launches=90, kernels=1)],
    )
    out, err = Stdout(is_terminal=True), Stdout(is_terminal=True)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    conclude(message)
    assert out.getvalue() == f"{directory}/rank3.json\n"
    assert [line for line in err.getvalue().splitlines() if len(line) > 80 and directory not in line] == []
    assert "fewer steps,\n  or no shapes" in err.getvalue()
    assert f"next:\n  torchperfd analyze {directory}\n" in err.getvalue()
