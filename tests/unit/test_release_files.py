"""What a release depends on: pinned actions with few permissions, and locked versions."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tests.support.node import ROOT
from tools.release.build import CHECKSUMS, ToolError, write_checksums
from tools.release.deb import PYTHONS, build_packages, debian_version, requirements_for

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def workflow(name: str) -> dict[Any, Any]:
    loaded: dict[Any, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text())
    return loaded


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflow_pins_each_action_by_commit(path: Path) -> None:
    used = re.findall(r"uses: (.*)", path.read_text(encoding="utf-8"))
    assert used
    assert [each for each in used if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", each)] == []


def test_workflows_use_one_commit_of_each_action() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in WORKFLOWS)
    commits = set(re.findall(r"uses: ([\w/-]+)@(\w+)", text))
    assert len(commits) == len({action for action, _ in commits})


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflow_may_only_read_unless_it_publishes(path: Path) -> None:
    loaded = workflow(path.name)
    assert loaded["permissions"] in ({}, {"contents": "read"})
    writing = {
        name: {key for key, value in job.get("permissions", {}).items() if value == "write"}
        for name, job in loaded["jobs"].items()
    }
    publishing = {
        "release.yml": {"publish": {"contents", "id-token", "attestations"}},
        "image.yml": {"build": {"packages"}, "publish": {"packages"}},
    }
    assert {name: rights for name, rights in writing.items() if rights} == publishing.get(path.name, {})


def test_release_publishes_only_what_has_been_checked() -> None:
    jobs = workflow("release.yml")["jobs"]
    commands = [step.get("run") for step in jobs["build"]["steps"]]
    # The packages are made of the wheels, and the first command empties their directory.
    assert commands.index("make release-check") < commands.index("make debs")
    assert jobs["publish"]["needs"] == "build"
    assert not any("checkout" in step.get("uses", "") for step in jobs["publish"]["steps"])
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert any(line.startswith("make ") and "release-check" in line.split() for line in lines)


@pytest.mark.parametrize("name", ["ci.yml", "release.yml"])
def test_checkout_has_the_tags_that_the_version_needs(name: str) -> None:
    steps = [step for job in workflow(name)["jobs"].values() for step in job["steps"]]
    (checkout,) = (step for step in steps if "checkout@" in step.get("uses", ""))
    assert checkout["with"]["fetch-depth"] == 0


def locked(name: str) -> list[Requirement]:
    """Return what a file in ``locks`` names; twice where new Pythons have another version than old ones."""
    lines = (ROOT / "locks" / name).read_text(encoding="utf-8").splitlines()
    return [Requirement(line.removesuffix("\\")) for line in lines if re.match(r"[\w.-]+(\[.*\])?==", line)]


def asked(name: str) -> Iterator[str]:
    """Yield the requirements that a file in ``locks`` is made from."""
    extras, groups = PROJECT["project"]["optional-dependencies"], PROJECT["dependency-groups"]
    if name == "release.txt":
        yield from groups["release"]
        return
    yield from PROJECT["project"]["dependencies"]
    yield from (*extras["web"], *extras["s3"], *extras["otlp"])
    if name == "development.txt":
        yield from (each for extra in ("wandb", "tensorboard", "mlflow", "lake") for each in extras[extra])
        yield from (each for group, members in groups.items() if group != "release" for each in members)


@pytest.mark.parametrize("name", ["runtime.txt", "release.txt", "development.txt"])
def test_lock_has_an_allowed_version_of_each_dependency(name: str) -> None:
    """`make locks` writes the files anew."""
    versions: dict[str, set[str]] = {}
    for each in locked(name):
        (exact,) = each.specifier
        versions.setdefault(canonicalize_name(each.name), set()).add(exact.version)
    wrong = {
        str(each): found
        for each in map(Requirement, asked(name))
        if not (found := versions.get(canonicalize_name(each.name)))
        or not all(each.specifier.contains(version) for version in found)
    }
    assert wrong == {}


@pytest.mark.parametrize("name", ["runtime.txt", "release.txt"])
def test_lock_of_what_is_published_has_hashes(name: str) -> None:
    text = (ROOT / "locks" / name).read_text(encoding="utf-8")
    assert "://" not in text
    assert len(re.findall(r"^[\w.-]+.*==.*\\\n    --hash=sha256:[0-9a-f]{64}", text, re.MULTILINE)) == len(
        locked(name)
    )


def test_extras_have_nothing_for_developers() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    assert set(extras) == {"wandb", "tensorboard", "mlflow", "s3", "dask", "web", "otlp", "lake", "all"}


def test_checksums_are_of_all_files(tmp_path: Path) -> None:
    (tmp_path / "b.whl").write_bytes(b"")
    (tmp_path / "a.tar.gz").write_bytes(b"abc")
    write_checksums(tmp_path)
    assert (tmp_path / CHECKSUMS).read_text().splitlines() == [
        "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad  a.tar.gz",
        "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855  b.whl",
    ]


@pytest.mark.parametrize("python", PYTHONS)
def test_package_has_one_version_of_each_dependency(python: str) -> None:
    lines = [line.removesuffix(" \\") for line in requirements_for(python).splitlines() if line[0].isalpha()]
    names = [Requirement(line).name for line in lines]
    assert sorted(names) == sorted({each.name for each in locked("runtime.txt")})


def test_package_for_an_old_python_has_an_old_numpy() -> None:
    numpy = {
        python: re.search(r"^numpy==(\S+)", requirements_for(python), re.MULTILINE) for python in PYTHONS
    }
    versions = {python: found[1] for python, found in numpy.items() if found}
    assert versions["3.11"] != versions["3.12"] == versions["3.13"]


def test_development_version_comes_before_its_release() -> None:
    assert debian_version("0.2.0") == "0.2.0"
    # dpkg orders a tilde before the end of a version.
    assert debian_version("0.2.1.dev7+g6ba749a4c") == "0.2.1~dev7+g6ba749a4c"


def test_release_without_maintainer_makes_no_package(tmp_path: Path) -> None:
    (tmp_path / "torchperfd-1.2.0-cp311-abi3-manylinux_2_17_x86_64.whl").touch()
    with pytest.raises(ToolError, match=r"deploy/debian/control: replace the placeholder .*\.invalid>"):
        build_packages(tmp_path)
