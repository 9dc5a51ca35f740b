"""Every command of ours is built in one place, which leaves out the current directory."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.node import ROOT

from torchperfd.model.own_commands import own_command, own_file_command, script_command

NAMES_THE_INTERPRETER = {
    "client/torchperfd/launch/runner.py": "compares it with Lightning's own command",
    "client/torchperfd/model/own_commands.py": "builds the commands",
    "daemon/torchperfd_daemon/analysis/ranks.py": "asks whether this user may run it",
    "daemon/torchperfd_daemon/captures/low_priority.py": "names the program of such a command, to exec it",
    "cli/torchperfd_cli/commands/run.py": "names the program of such a command, to exec it",
    "cli/torchperfd_cli/commands/version.py": "prints it",
    "daemon/torchperfd_daemon/service/stuck_rank_stacks.py": "looks for py-spy beside it",
}
STARTS_INTERPRETERS = re.compile(
    r"(ProcessPoolExecutor|get_context|set_start_method|set_executable|_args_from_interpreter_flags|Pool|Process"
    r"|spawn\w*|system|popen|getoutput|getstatusoutput|create_subprocess_shell|posix_spawnp?)"
)
FORKS = {"daemon/torchperfd_daemon/worker_cost.py"}
INTERPRETER = re.compile(r"(.*/)?(pypy|python)[\d.]*")


def sources() -> Iterator[tuple[str, ast.Module]]:
    for place in ("client/torchperfd", "daemon/torchperfd_daemon", "cli/torchperfd_cli"):
        for path in sorted((ROOT / place).rglob("*.py")):
            if not path.name.endswith(("_pb2.py", "_pb2_grpc.py")):
                yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def names_interpreter(node: ast.AST) -> bool:
    """Return whether an expression names it: by the attribute, by an import, by a string."""
    match node:
        case ast.Attribute(attr="executable" | "_base_executable"):
            return True
        case ast.ImportFrom(module="sys", names=names):
            return any(each.name in ("executable", "_base_executable", "*") for each in names)
        case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=str(name)), *_]):
            return name.endswith("executable")
        case ast.List(elts=[ast.Constant(value=str(first)), *_]):
            return INTERPRETER.fullmatch(first) is not None
    return False


def test_own_commands_alone_names_the_interpreter() -> None:
    found = {name for name, tree in sources() if any(map(names_interpreter, ast.walk(tree)))}
    assert found == set(NAMES_THE_INTERPRETER)


def test_no_other_way_of_starting_an_interpreter_is_used() -> None:
    """:mod:`multiprocessing` runs ``python -c`` for all but a fork, and a shell may run anything."""
    found = set()
    for name, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                called = node.func
                attribute = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
                shell = any(each.arg == "shell" for each in node.keywords)
                if shell or STARTS_INTERPRETERS.fullmatch(attribute):
                    found.add(name)
    assert found == FORKS


@pytest.mark.parametrize(
    "spelling",
    [
        "subprocess.run([sys.executable, '-m', 'x'])",
        "from sys import executable",
        "from sys import executable as python",
        "python = getattr(sys, 'executable')",
        "run(['python3', '-c', code])",
        "run(['/usr/bin/python3.11', name])",
    ],
)
def test_any_spelling_of_the_interpreter_is_found(spelling: str) -> None:
    assert any(map(names_interpreter, ast.walk(ast.parse(spelling))))


def test_commands_have_flags_for_our_own_code_only() -> None:
    assert own_command("torchperfd", "ps") == [sys.executable, "-P", "-m", "torchperfd", "ps"]
    assert own_file_command("/x.py", "a") == [sys.executable, "-P", "/x.py", "a"]
    python, file, *words = script_command("torchperfd.__main__", "run", "-m", "x")
    assert (python, Path(file).name, words) == (
        sys.executable,
        "own_commands.py",
        ["torchperfd.__main__", "run", "-m", "x"],
    )
    assert Path(file).is_absolute()


@pytest.mark.parametrize(
    ("flag", "kept"), [("-I", ["-I"]), ("-E", ["-E"]), ("-s", ["-s"]), ("-Es", ["-E", "-s"])]
)
def test_own_command_ignores_what_this_process_ignores(flag: str, kept: list[str]) -> None:
    code = "from torchperfd.model.own_commands import own_command; print(own_command('x')[1:])"
    done = subprocess.run([sys.executable, flag, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"{[*kept, '-P', '-m', 'x']}\n"
