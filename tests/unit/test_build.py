"""The build writes down which version and which commit it is of."""

import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "client" / "torchperfd").mkdir(parents=True)
    return tmp_path


def written(tree: Path) -> dict[str, str]:
    names: dict[str, str] = {}
    exec((tree / "client" / "torchperfd" / "_build.py").read_text(), names)
    return {name: names[name] for name in ("VERSION", "REVISION")}


def test_build_in_checkout_writes_its_commit(build: ModuleType, tree: Path) -> None:
    git = ("git", "-C", str(tree), "-c", "user.name=n", "-c", "user.email=e@example.org")
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "First"], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout
    build.write_version(tree, "0.2.0")
    assert written(tree) == {"VERSION": "0.2.0", "REVISION": commit[:12]}


def test_build_without_git_takes_commit_of_version(build: ModuleType, tree: Path) -> None:
    build.write_version(tree, "0.2.1.dev7+g6ba749a4c.d20261128")
    assert written(tree)["REVISION"] == "6ba749a4c"


def test_build_of_source_distribution_keeps_its_commit(build: ModuleType, tree: Path) -> None:
    build.write_version(tree, "0.2.1.dev7+g6ba749a4c")
    build.write_version(tree, "0.2.0")
    assert written(tree) == {"VERSION": "0.2.0", "REVISION": "6ba749a4c"}


def test_build_without_any_commit_leaves_it_empty(build: ModuleType, tree: Path) -> None:
    build.write_version(tree, "0.1.dev0")
    assert written(tree) == {"VERSION": "0.1.dev0", "REVISION": ""}
