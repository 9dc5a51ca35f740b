"""The drawing of the daemon is the contract, no command loads torch, and the command table is complete."""

import subprocess
import sys
import tomllib

from tests.support.node import ROOT


def test_architecture_daemon_drawing_is_the_contract() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (contract,) = (one for one in contracts if one["name"].startswith("In the daemon"))
    page = (ROOT / "docs" / "architecture.md").read_text()
    drawing = page.split("## The daemon's rooms")[1].split("```")[1]
    assert drawing.split("\n")[1:-1] == contract["layers"]


def test_no_command_of_the_daemons_loads_torch() -> None:
    code = (
        "import importlib, sys\n"
        "from torchperfd_daemon.cli import COMMANDS\n"
        "for name in COMMANDS: importlib.import_module(f'torchperfd_daemon.commands.{name}')\n"
        "import torchperfd_daemon.server\n"
        "print('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_the_command_table_and_the_modules_agree() -> None:
    from torchperfd_daemon.cli import COMMANDS

    folder = ROOT / "daemon" / "torchperfd_daemon" / "commands"
    assert {path.stem for path in folder.glob("[a-z]*.py")} == set(COMMANDS)
