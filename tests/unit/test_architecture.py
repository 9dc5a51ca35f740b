"""Rules of the tree: layers, private names, commands, retired words and short names of tests."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.node import ROOT

from torchperfd.model.source_lines import CALLING_FILES, HOOKS_FOLDER, WRAPPED_DRAWS_FILE


@pytest.mark.parametrize("package", ["client", "daemon", "command line"])
def test_architecture_drawing_is_the_contract(package: str) -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (contract,) = (one for one in contracts if one["name"].startswith(f"In the {package}"))
    page = (ROOT / "docs" / "architecture.md").read_text()
    drawing = page.split(f"## The {package}'s packages")[1].split("```")[1]
    assert drawing.split("\n")[1:-1] == contract["layers"]


def test_architecture_names_files_that_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    files = [
        path.as_posix()
        for place in ("client", "daemon", "cli", "tests")
        for path in (ROOT / place).rglob("*.[chp]*")
    ]
    named = set(re.findall(r"`([\w/]+\.(?:py|c))`", page))
    assert len(named) > 10
    assert [name for name in sorted(named) if not any(file.endswith(f"/{name}") for file in files)] == []


def test_files_that_stacks_show_of_the_client_exist() -> None:
    client = ROOT / "client"
    assert (client / HOOKS_FOLDER[1:]).is_dir()
    assert (client / WRAPPED_DRAWS_FILE[1:]).is_file()
    assert (client / "torchperfd" / CALLING_FILES[0]).is_file()


def test_named_test_files_exist() -> None:
    exist = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    named = {
        (name, path.relative_to(ROOT).as_posix())
        for place in ("tests", "docs", "benchmarks", "tools", "CONTRIBUTING.md", "Makefile")
        for path in written(place)
        for name in re.findall(r"\btest_\w+\.py\b", path.read_text(encoding="utf-8"))
    }
    assert [each for each in sorted(named) if each[0] not in exist] == []


def test_no_command_of_the_daemons_loads_torch() -> None:
    code = (
        "import sys\n"
        "from torchperfd_cli.main import COMMANDS, command_module\n"
        "for name in COMMANDS: command_module(name)\n"
        "import torchperfd_daemon.server.daemon\n"
        "print('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_the_daemon_loads_of_numpy_what_it_uses() -> None:
    """Neither a thread for every core, nor megabytes of masked arrays."""
    code = (
        "import os, sys, torchperfd_cli.commands.serve, torchperfd_daemon.server.daemon\n"
        "print(len(os.listdir('/proc/self/task')), 'numpy' in sys.modules, 'numpy.ma' in sys.modules)"
    )
    env = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    assert done.stdout == "1 True False\n"


def test_attaching_loads_nothing_that_lays_out_documents() -> None:
    code = "import sys, torchperfd.client\nprint([each for each in sys.modules if 'perfd.document' in each])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_command_table_and_the_modules_agree() -> None:
    from torchperfd_cli.main import COMMANDS, MODULES

    folder = ROOT / "cli" / "torchperfd_cli" / "commands"
    named = {MODULES.get(name, name) for name in COMMANDS}
    assert {path.stem for path in folder.glob("[a-z]*.py")} == {name for name in named if name[0] != "_"}
    assert set(MODULES) < set(COMMANDS)


def test_commands_print_through_one_function() -> None:
    prints = re.compile(r"click\.echo\(|\bprint\(")
    files = (ROOT / "cli" / "torchperfd_cli").rglob("*.py")
    # `main` shows errors, and `top` draws a screen.
    assert {path.name for path in files if prints.search(path.read_text())} <= {
        "_output.py",
        "main.py",
        "top.py",
    }


ALLOWED = {
    "os, sys, ctypes, threading, named tuples": {
        "_DummyThread",
        "_current_frames",
        "_exit",
        "_getframe",
        "_obj",
        "_replace",
    },
    "Jupyter calls it to show an object": {"_repr_html_"},
    "torch's: tests check what hooks leave there, or drive torch as it drives itself": {
        "_BaseDataLoaderIter",
        "_C",
        "_autograd",
        "_compiled_call_impl",
        "_dataset_fetcher",
        "_distributed_c10d",
        "_dynamo",
        "_forward_hooks",
        "_forward_pre_hooks",
        "_get_foreach_kernels_supported_devices",
        "_get_fused_kernels_supported_devices",
        "_global_optimizer_post_hooks",
        "_global_optimizer_pre_hooks",
        "_next_data",
        "_num_yielded",
        "_parse_kineto_results",
        "_pin_memory",
        "_prepare_trace",
        "_replicate_for_data_parallel",
        "_send_idx",
        "_start_trace",
    },
    "fastai's and Lightning's: what our callbacks and launcher change": {
        "_basic_subprocess_cmd",
        "_raw_values",
    },
}
"""Private names of others that tests may read, by the reason."""


def private_reads(path: Path) -> Iterator[str]:
    """Yield the private attributes that a file reads of anything but ``self`` and ``cls``."""
    allowed = set().union(*ALLOWED.values())
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Attribute) or not node.attr.startswith("_") or node.attr.endswith("__"):
            continue
        own = isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}
        if not own and node.attr not in allowed:
            yield f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"


def test_tests_read_no_private_attributes() -> None:
    files = sorted((ROOT / "tests").rglob("*.py"))
    assert files
    assert [read for path in files for read in private_reads(path)] == []


def commands_taken(path: Path) -> Iterator[str]:
    """Yield where a file takes a command from its module, and not from the program."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.ImportFrom(module=str(module), names=names, lineno=line):
                taken = ".commands." in module and any(each.name.endswith("_command") for each in names)
            case ast.Call(func=ast.Attribute(attr="invoke"), args=[first, *_], lineno=line):
                taken = isinstance(first, ast.Attribute) and first.attr.endswith("_command")
            case _:
                continue
        if taken:
            yield f"{path.relative_to(ROOT)}:{line}"


def test_tests_run_commands_as_the_program_does() -> None:
    # click keeps a command's help option from its first call on: without the program, "-h" is missing
    # for the rest of the process.
    files = sorted((ROOT / "tests").rglob("*.py"))
    assert [taken for path in files for taken in commands_taken(path)] == []


RETIRED = re.compile(
    r"\b(?:"
    # Names of classes and modules.
    r"AbsentRank|Accountant|CaptureDesk|Cycle|Desk|Dialogue|Door|Doorkeeper|Follower|Gathered|Keeper|Ledger"
    r"|Meeting|OrderDesk|Patience|Precedence|Pump|Rhythm|Rota|Scene|Scribe|StackDesk|StackTeller"
    r"|Stretch|Surroundings|Tallies|Visitor|_Court|try_cause"
    # Metaphors.
    r"|beats|books?|campaigns?|dawdles?|deeds?|desks?|doors?|felt|glances|graves|hears?|heard|humbly|keepers?"
    r"|ledger|lessons?|nobody|obeys?|pulses?|pump|quietly|relieves?|scenes?|tallies|tally|tapes?|tells|tickets?"
    r"|told|visitors?|whoever"
    # Phrases.
    r"|[Bb]y turns|[Ff]or good|Nor does|says? of|(?<!\.)tell(?!\())\b"
)
"""Metaphors for classes and functions, and phrases; docs/glossary.md has the terms in use."""

WRITTEN = {".c", ".h", ".js", ".md", ".py", ".sh", ".toml", ".txt", ".yaml", ".yml"}
PLACES = (
    *("client", "daemon", "cli", "tests", "benchmarks", "docs", "deploy", "grafana", "tools"),
    *("README.md", "CONTRIBUTING.md", "Makefile", "pyproject.toml"),
)

LONGEST_TEST_NAME = 60


def written(*places: str) -> Iterator[Path]:
    """Yield the files that people write in, without generated code."""
    for place in places:
        for path in [ROOT / place] if (ROOT / place).is_file() else sorted((ROOT / place).rglob("*")):
            if path.suffix in WRITTEN and "_pb2" not in path.name and path != Path(__file__):
                yield path


def test_tree_retired_words_are_absent() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match[0]}"
        for path in written(*PLACES)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        for match in RETIRED.finditer(line)
    ]
    assert found == []


def test_tests_names_are_short() -> None:
    names = [
        name
        for path in written("tests")
        for name in re.findall(
            r"^ *(?:async )?def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE
        )
    ]
    assert names
    assert [name for name in names if len(name) > LONGEST_TEST_NAME] == []
