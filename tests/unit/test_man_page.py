"""The man page, which is generated from the command line."""

import importlib.util
import shutil
import subprocess
from types import ModuleType

import click
import pytest
from tests.support.node import ROOT

from torchperfd_cli.main import COMMANDS, cli


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("man_page", ROOT / "tools" / "man_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_man_page_has_every_command_and_option(tool: ModuleType) -> None:
    page = tool.man_page()
    assert tool.escape("--report FILE") in page
    for name in COMMANDS:
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        assert f'.SS "torchperfd {name}' in page
        shown = [each for each in command.params if not getattr(each, "hidden", False)]
        options = [option for each in shown for option in each.opts if option.startswith("--")]
        assert all(tool.escape(option) in page for option in options), name


def test_man_page_has_no_line_that_roff_would_take_for_a_request(tool: ModuleType) -> None:
    known = (".TH ", ".SH ", ".SS ", ".TP", ".PP", ".nf", ".fi", ".B ")
    requests = [line for line in tool.man_page().splitlines() if line.startswith((".", "'"))]
    assert requests
    assert [line for line in requests if not line.startswith(known)] == []


def test_man_page_escape_keeps_dashes_and_backslashes(tool: ModuleType) -> None:
    assert tool.escape(r"--json \n") == r"\-\-json \en"
    assert tool.escape(".hidden") == r"\&.hidden"


def test_man_page_is_laid_out_by_man(tool: ModuleType) -> None:
    man = shutil.which("groff")
    if man is None:
        pytest.skip("groff is not installed")
    done = subprocess.run(
        [man, "-man", "-Tutf8", "-ww"], input=tool.man_page().encode(), capture_output=True, check=True
    )
    assert b"torchperfd capture" in done.stdout


def test_man_page_in_deploy_is_that_of_the_commands(tool: ModuleType) -> None:
    assert tool.PATH.read_text() == tool.man_page(), "run `make man`"
