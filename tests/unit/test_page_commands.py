"""Commands that operators copy: a test runs each, or its page says which were not run, and why."""

import ast
from pathlib import Path

import pytest
from tests.integration.test_documented_commands import COMMANDS, ELSEWHERE
from tests.support.node import ROOT
from tests.support.page_commands import PAGES, begins, blocks, commands, not_run, run_commands

from torchperfd_daemon.config.effective import find_files, resolve

SERVICE = "tests/deploy/test_systemd_page.py::test_commands_of_the_page_install_and_remove_a_service"
RUN = {
    "deploy/README.md": {
        "sha256sum": "tests/deploy/test_deploy_commands.py::test_release_is_installed_without_an_index",
        "pip download": "tests/deploy/test_deploy_commands.py::test_release_is_installed_without_an_index",
        "pip install": "tests/deploy/test_deploy_commands.py::test_release_is_installed_without_an_index",
    },
    "deploy/compose/README.md": {
        "install": "tests/deploy/test_deploy_commands.py::test_directories_are_given_to_the_images_user",
    },
    "deploy/debian/README.md": {
        "make release-check": ".ci/run",
        "torchperfd ps": "tests/deploy/test_deb.py::test_package_runs_as_a_service_until_it_is_purged",
    },
    "deploy/docker/README.md": {
        "install": "tests/deploy/test_deploy_commands.py::test_directories_are_given_to_the_images_user",
    },
    "deploy/kubernetes/README.md": {
        "torchrun": "tests/deploy/test_injection.py::test_line_of_the_page_starts_ranks_with_the_client",
    },
    "deploy/slurm/README.md": {
        "sbatch": "tools/test_slurm.sh",
        "sacct": "tools/test_slurm.sh",
    },
    "deploy/systemd/README.md": {
        "python3 -m venv": SERVICE,
        "ln -s": SERVICE,
        "install": SERVICE,
        "cp": SERVICE,
        "systemctl": SERVICE,
        "curl": SERVICE,
        "rm": SERVICE,
        "userdel": SERVICE,
        "/opt/torchperfd/bin/pip install": SERVICE,
        "torchperfd": SERVICE,
    },
}
"""Who runs the commands of a page that begin so: a test, or a script that a test starts.

Each reads the page, or has the words. All commands of docs/ that start torchperfd are those of
``test_documented_commands``.
"""


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def is_run_with_the_docs(line: str) -> bool:
    return any(each.line == line for each in COMMANDS)


def unaccounted(page: str, text: str) -> dict[str, int]:
    """Return the commands of a page that are not in exactly one place, with the number of places."""
    places = [*RUN.get(page, {}), *not_run(text)]
    counts = {
        line: sum(begins(line, name) for name in places) + is_run_with_the_docs(line)
        for line in commands(text)
    }
    return {line: count for line, count in counts.items() if count != 1}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_command_is_run_or_the_page_says_why_not(page: Path) -> None:
    assert unaccounted(name_of(page), page.read_text(encoding="utf-8")) == {}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_what_a_page_says_was_not_run_is_on_it(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    shown = commands(text)
    named = [*RUN.get(name_of(page), {}), *not_run(text)]
    assert [name for name in named if not any(begins(line, name) for line in shown)] == []
    assert [reason for reason in not_run(text).values() if len(reason.split()) < 2] == []


@pytest.mark.parametrize("page", RUN)
def test_place_that_runs_a_command_has_its_words(page: str) -> None:
    assert ROOT / page in PAGES
    for words, place in RUN[page].items():
        path, _, test = place.partition("::")
        text = (ROOT / path).read_text(encoding="utf-8")
        if test:
            (function,) = (
                node
                for node in ast.walk(ast.parse(text))
                if isinstance(node, ast.FunctionDef) and node.name == test
            )
            text = ast.get_source_segment(text, function) or ""
        as_arguments = '", "'.join(words.split())
        assert any(each in text for each in (words, as_arguments, page)), f"{place} does not run {words!r}"


def test_settings_on_the_pages_are_accepted_by_the_daemon(tmp_path: Path) -> None:
    shown = [block for page in PAGES for _, block in blocks(page.read_text(encoding="utf-8"), "toml")]
    assert len(shown) >= 3
    for block in shown:
        file = tmp_path / "config.toml"
        file.write_text(block)
        resolve({}, find_files(file, tmp_path / "none"), {}).serve_settings()


def test_scripts_that_run_commands_are_started_by_tests() -> None:
    scripts = {place for places in RUN.values() for place in places.values() if place.endswith(".sh")}
    tests = "".join(
        path.read_text(encoding="utf-8")
        for folder in ("deploy", "integration")
        for path in (ROOT / "tests" / folder).glob("test_*.py")
    )
    assert scripts
    assert [script for script in scripts if Path(script).name not in tests] == []


def test_tests_of_the_docs_that_are_elsewhere_exist() -> None:
    assert all((ROOT / "tests" / path).is_file() for path, _ in ELSEWHERE.values())


TEXT = """
```sh
sudo cp a b   # a comment
docker build -f x \\
  --tag y .
```

```
$ sacct -j 1 --format=A%9
output
```

```yaml
  - run: pip install z
  - uses: nothing
```

**Not run:** `docker build` (no engine
here), `pip install` and `sacct` (no reason).
"""


def test_commands_of_each_kind_of_block_are_found() -> None:
    assert commands(TEXT) == [
        "sudo cp a b",
        "docker build -f x --tag y .",
        "sacct -j 1 --format=A%9",
        "pip install z",
    ]
    assert not_run(TEXT) == {
        "docker build": "no engine here",
        "pip install": "no reason",
        "sacct": "no reason",
    }
    assert run_commands(TEXT) == ["sudo cp a b"]


def test_command_in_no_place_or_in_two_is_found() -> None:
    assert unaccounted("deploy/README.md", TEXT) == {"sudo cp a b": 0, "pip install z": 2}
