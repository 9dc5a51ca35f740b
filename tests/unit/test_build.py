"""The build writes its version and commit, and can be made to fail without a compiler."""

import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

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
    build.write_version(tree, "0.2.1.dev7+g6ba749a4c2f1")
    build.write_version(tree, "0.2.1.dev7+g6ba749a4c")
    assert written(tree)["REVISION"] == "6ba749a4c2f1"
    build.write_version(tree, "0.2.0")
    assert written(tree) == {"VERSION": "0.2.0", "REVISION": "6ba749a4c2f1"}


def test_build_of_another_version_drops_an_earlier_commit(build: ModuleType, tree: Path) -> None:
    build.write_version(tree, "0.2.1.dev7+g6ba749a4c2f1")
    build.write_version(tree, "0.2.1.dev8+g0123456ab")
    assert written(tree)["REVISION"] == "0123456ab"


def test_build_without_any_commit_leaves_it_empty(build: ModuleType, tree: Path) -> None:
    build.write_version(tree, "0.1.dev0")
    assert written(tree) == {"VERSION": "0.1.dev0", "REVISION": ""}


def built(build: ModuleType, tree: Path) -> dict[str, Any]:
    """Run the build's hook for a wheel; return what the wheel gets from it."""
    data: dict[str, Any] = {"artifacts": [], "force_include": {}, "pure_python": True}
    metadata = SimpleNamespace(version="0.2.0")
    hook = build.BuildHook(str(tree), {"exported": {}}, None, metadata, str(tree), "wheel")
    hook.initialize("standard", data)
    return data


def test_build_without_a_compiler_leaves_modules_out(
    build: ModuleType, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "false")
    monkeypatch.delenv("TORCHPERFD_REQUIRE_NATIVE", raising=False)
    data = built(build, tree)
    assert data["artifacts"] == [build.BUILD_FILE]
    assert data["pure_python"]


def test_build_that_requires_modules_fails_without_compiler(
    build: ModuleType, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "false")
    monkeypatch.setenv("TORCHPERFD_REQUIRE_NATIVE", "1")
    with pytest.raises(RuntimeError, match=r"^TORCHPERFD_REQUIRE_NATIVE=1, but client/.* cannot be compiled"):
        built(build, tree)


def test_build_names_the_platform_that_it_compiles_for(
    build: ModuleType, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "true")
    monkeypatch.setenv("_PYTHON_HOST_PLATFORM", "manylinux_2_17_aarch64")
    assert built(build, tree)["tag"] == "cp311-abi3-manylinux_2_17_aarch64"
