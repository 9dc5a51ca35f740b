"""The documentation site and the man page, both made from the command line."""

import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import click
import pytest
from tests.support.node import ROOT

from torchperfd.launch.runner import parse
from torchperfd_cli.main import COMMANDS, cli

TREE = Path(__file__).resolve().parents[2]
PAGES = sorted([TREE / "README.md", *(TREE / "docs").rglob("*.md"), *(TREE / "deploy").rglob("*.md")])
_FENCED = re.compile(r"```[a-z]*\n(.*?)```", re.DOTALL)
_INLINE = re.compile(r"`((?:torchperfd) [^`\n]+)`")


def shown_commands(page: Path) -> Iterator[str]:
    """Return the command lines of torchperfd on a page, without comments, prompts and pipes."""
    text = page.read_text()
    lines = [line for block in _FENCED.findall(text) for line in block.replace("\\\n", " ").splitlines()]
    for line in [*lines, *_INLINE.findall(text)]:
        command = re.split(r"\s+#|\s[|;&]|…|\s\.\.\.", line.strip().removeprefix("$ "))[0].strip()
        if re.match(r"torchperfd [a-z]", command):
            yield command


def known_options(command: click.Command) -> set[str]:
    return {name for each in command.params for name in (*each.opts, *each.secondary_opts)} | {"-h", "--help"}


def unknown_words(line: str) -> str:
    """Return what of a command line does not exist; empty where all does."""
    words = shlex.split(line.replace("[", "").replace("]", ""))[1:]
    name, *rest = words
    if name not in COMMANDS:
        return name
    if name == "run":
        parse([*rest, "script.py"])
        return ""
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        nested = command.get_command(click.Context(command), rest[0].rstrip(","))
        if nested is None:
            return rest[0]
        command, rest = nested, rest[1:]
    options = [word.partition("=")[0] for word in rest if re.match(r"--?[a-z]", word)]
    return " ".join(option for option in options if option not in known_options(command))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(TREE)))
def test_commands_of_a_page_exist_with_their_options(page: Path) -> None:
    wrong = {line: unknown for line in shown_commands(page) if (unknown := unknown_words(line))}
    assert wrong == {}


def test_pages_show_commands_at_all() -> None:
    shown = [line.split()[1] for page in PAGES for line in shown_commands(page)]
    assert len(shown) > 100
    assert {"run", "serve", "capture", "analyze", "compare", "bench", "stacks", "top"} <= set(shown)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install --group docs")
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, str(TREE / "tools" / "docs_site.py"), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_site_has_a_page_and_its_markdown_for_each_file(site: Path) -> None:
    from tools.docs_site import with_sections

    for page in PAGES:
        path = site / page.relative_to(TREE)
        assert path.read_text() == with_sections(page.read_text())
        html = path.with_name("index.html") if path.name == "README.md" else path.with_suffix(".html")
        assert "<html" in html.read_text()


def test_page_of_all_options_comes_from_the_command_line(site: Path) -> None:
    page = (site / "docs" / "commands.md").read_text()
    assert all(f"### torchperfd {name}\n" in page for name in COMMANDS)
    assert "#### torchperfd bench dataloader\n" in page
    assert "--fail-above PERCENT" in page


def test_llms_txt_lists_pages_that_exist(site: Path) -> None:
    targets = re.findall(r"\]\(([^)]+)\)", (site / "llms.txt").read_text())
    assert len(targets) > 50
    assert [target for target in targets if not (site / target).is_file()] == []


def test_broken_link_fails_the_build(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install --group docs")
    copy = tmp_path / "copy"
    left_out = shutil.ignore_patterns(".*", "site", "dist", "build", "__pycache__", "*.so", "demo-out")
    shutil.copytree(TREE, copy, ignore=left_out)
    subprocess.run(["git", "init", "-q", str(copy)], check=True)
    page = copy / "docs" / "glossary.md"
    page.write_text(page.read_text() + "\n[nothing](phases.md#no-such-anchor)\n")
    command = [sys.executable, str(copy / "tools" / "docs_site.py"), "--out", str(tmp_path / "site")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "no-such-anchor" in done.stdout + done.stderr


def test_docs_are_short_enough_to_be_read() -> None:
    """Shorten other pages before you raise a bound. The bars of tables are no words."""
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md")]
    assert len(texts) <= 75
    assert sum(len(re.findall(r"\S*\w\S*", text)) for text in texts) <= 50_000


def test_no_text_installs_torchperfd_from_an_index() -> None:
    """No index has the package; anybody could register its name there and run code on machines of readers."""
    from_index = re.compile(
        r"pip install\b[^`\n#;|]*[ '\"]torchperfd(?:\[[a-z0-9,]+\])?(?=['\"`\s;,.]|$)", re.MULTILINE
    )
    listed = subprocess.run(
        ["git", "ls-files", "*.md", "*.yaml", "*.yml", "*.py", "*.txt", "*.sbatch", "*.service", "*.js"],
        cwd=TREE, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    texts = {name: (TREE / name).read_text(encoding="utf-8") for name in listed if (TREE / name).is_file()}
    found = {
        name: from_index.findall(text)
        for name, text in texts.items()
        if name != "tests/unit/test_docs_site.py"
    }
    assert {name: each for name, each in found.items() if each} == {}
    assert from_index.search("- run: pip install torch torchperfd") is not None
    assert from_index.search("pip install 'torchperfd[s3]'") is not None
    assert from_index.search("pip install torch ./wheels/torchperfd-*.whl") is None


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
