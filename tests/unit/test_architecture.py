"""The drawings of all packages are the contracts; no command loads torch; the command table is complete."""

import re
import subprocess
import sys
import tomllib

import pytest
from tests.support.node import ROOT


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


def test_no_command_of_the_daemons_loads_torch() -> None:
    code = (
        "import importlib, sys\n"
        "from torchperfd_cli.main import COMMANDS\n"
        "for name in COMMANDS: importlib.import_module(f'torchperfd_cli.commands.{name}')\n"
        "import torchperfd_daemon.server.daemon\n"
        "print('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_the_command_table_and_the_modules_agree() -> None:
    from torchperfd_cli.main import COMMANDS

    folder = ROOT / "cli" / "torchperfd_cli" / "commands"
    assert {path.stem for path in folder.glob("[a-z]*.py")} == set(COMMANDS)
