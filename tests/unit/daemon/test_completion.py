"""What shells complete: through click itself, and through the real bash with the script that is printed."""

import contextlib
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete
from tests.support.run_documents import run_file

from torchperfd.launch.options import OPTIONS
from torchperfd.report.store import RunStore
from torchperfd.v1 import control_pb2
from torchperfd_cli import main
from torchperfd_cli.commands import _daemon
from torchperfd_daemon.captures.catalog import Catalog
from torchperfd_daemon.errors import DaemonUnreachableError

CAPTURES = ("20261127-165610-645ff7", "20261127-165810-0a5ff7")
FILE = ("file", "")


@pytest.fixture
def directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two captures and two kept runs, which the environment names; and no daemon."""
    for name in CAPTURES:
        Catalog(tmp_path / "captures").create(name)
    store = RunStore(str(tmp_path / "runs"))
    for run in ("train-3f2a", "train-77aa"):
        store.keep(run_file(run, steps=20, seconds={"forward": 0.1}))
    monkeypatch.setenv("TORCHPERFD_RUNS_DIR", str(tmp_path / "runs"))
    monkeypatch.setenv("TORCHPERFD_CAPTURES_DIR", str(tmp_path / "captures"))
    monkeypatch.setenv("TORCHPERFD_SOCKET", str(tmp_path / "none.sock"))
    return tmp_path


def completions(line: str) -> list[tuple[str, str]]:
    """Return type and value of what may complete a line; the value of files is left to the shell."""
    *words, incomplete = shlex.split(line) + ([""] if line.endswith(" ") else [])
    found = ShellComplete(main.cli, {}, "torchperfd", "_TORCHPERFD_COMPLETE").get_completions(
        words, incomplete
    )
    return [(each.type, each.value if each.type == "plain" else "") for each in found]


def names(line: str) -> list[str]:
    return [value for kind, value in completions(line) if kind == "plain"]


def test_completion_completes_commands_and_options() -> None:
    assert names("ca") == ["capture", "captures"]
    assert "--steps" in names("capture --s")
    assert names("captures li") == ["list"]
    assert "input-bound" in names("explain inp")


def test_completion_of_run_has_its_options_up_to_the_script(directories: Path) -> None:
    options = [option.name for option in OPTIONS]
    assert names("run --") == [*options, "--help"]
    assert names("run --quiet --no") == ["--no-keep", "--no-advise", "--no-daemon"]
    assert completions("run --job x tr") == completions("run ") == completions("run train.py --o") == [FILE]
    assert completions("run --job ") == completions("run -m ") == completions("run --nonsense x ") == []
    assert completions("run --report ") == [FILE]
    assert completions("run --runs-dir ") == [("dir", "")]


def test_completion_of_a_baseline_has_kept_runs(directories: Path) -> None:
    assert completions("run --baseline tr") == [FILE, ("plain", "train-3f2a"), ("plain", "train-77aa")]
    elsewhere = directories / "elsewhere"
    assert completions(f"run --runs-dir {elsewhere} --baseline tr") == [FILE]


@pytest.mark.parametrize("line", ["captures get 2026", "captures rm ", "captures pin 20261127", "analyze 2"])
def test_completion_has_ids_of_captures(directories: Path, line: str) -> None:
    assert names(line) == list(CAPTURES)


def test_completion_reads_the_directory_that_is_named(directories: Path) -> None:
    elsewhere = directories / "elsewhere"
    assert names(f"captures --captures-dir {elsewhere} get 2026") == []
    assert names(f"analyze --captures-dir {elsewhere} 2026") == []
    assert names(f"runs --runs-dir {elsewhere} show tr") == []


def test_completion_has_ids_of_kept_runs(directories: Path) -> None:
    assert names("runs show train-7") == ["train-77aa"]
    assert names("compare train-3f2a ") == [*CAPTURES, "train-3f2a", "train-77aa"]


class FakeDaemon:
    def ListRuns(self, request: control_pb2.ListRunsRequest, timeout: float) -> object:  # noqa: N802
        runs = [control_pb2.Run(run=name, job_name="bert") for name in ("bert-17", "bert-18", "gpt-1")]
        return control_pb2.ListRunsResponse(runs=runs)

    def GetGoodput(self, request: control_pb2.GetGoodputRequest, timeout: float) -> object:  # noqa: N802
        return control_pb2.GetGoodputResponse(runs=[control_pb2.RunGoodput(run="bert-1")])


@pytest.mark.parametrize("name", ["ranks", "steps", "diagnose", "whatif", "capture", "stacks", "top", "open"])
def test_completion_has_names_of_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def connect(socket: str | None, answer_seconds: float) -> contextlib.nullcontext[FakeDaemon]:
        asked.append(socket)
        return contextlib.nullcontext(FakeDaemon())

    # A command that is imported only now would keep the fake for the tests that follow.
    for command in (name, "goodput"):
        main.command_module(command)
    monkeypatch.setattr(_daemon, "connect", connect)
    assert names(f"{name} --socket /run/x.sock --run be") == ["bert-17", "bert-18"]
    assert asked == ["/run/x.sock"]
    if name not in ("steps", "whatif", "stacks", "open"):
        assert names(f"{name} --job ") == ["bert"]
    assert names("goodput --run b") == ["bert-1"]


def test_completion_without_a_daemon_is_nothing(directories: Path) -> None:
    assert completions("ranks --run b") == []


@pytest.fixture
def bash(directories: Path) -> Callable[..., list[str]]:
    """Press Tab behind a line in the real bash; return what it offers."""
    script = directories / "completion.bash"
    program = directories / "bin" / "torchperfd"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m torchperfd "$@"\n')
    program.chmod(0o755)
    env = {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}"}
    printed = subprocess.run(
        ["torchperfd", "completion", "bash"], env=env, capture_output=True, text=True, check=True
    )
    script.write_text(printed.stdout)

    def press_tab(line: str) -> list[str]:
        words = shlex.split(line) + ([""] if line.endswith(" ") else [])
        tab = (
            f"compopt() {{ :; }}; source {shlex.quote(str(script))}; complete -p torchperfd >&2;"
            f"COMP_WORDS=({' '.join(map(shlex.quote, words))}); COMP_CWORD={len(words) - 1};"
            '_torchperfd_completion torchperfd; printf "%s\\n" "${COMPREPLY[@]}"'
        )
        done = subprocess.run(
            ["bash", "--norc", "-c", tab],
            env=env,
            cwd=directories,
            capture_output=True,
            text=True,
            check=True,
        )
        assert "_torchperfd_completion" in done.stderr
        return done.stdout.split()

    return press_tab


@pytest.mark.needs("bash")
def test_bash_completes_commands_options_and_ids(bash: Callable[..., list[str]]) -> None:
    assert bash("torchperfd dash") == ["dashboards"]
    assert bash("torchperfd run --base") == ["--baseline"]
    assert bash("torchperfd run --baseline train-3") == ["train-3f2a"]
    assert bash("torchperfd captures get 2026") == list(CAPTURES)


def test_completion_survives_a_daemon_that_fails(directories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise DaemonUnreachableError("no daemon answers")

    monkeypatch.setattr(_daemon, "connect", refuse)
    assert completions("goodput --run b") == []
