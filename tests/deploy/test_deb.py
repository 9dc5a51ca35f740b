"""The Debian package: built from a wheel, and installed, upgraded and purged on a booted Debian 12."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from tests.deploy.debian_folder import BootedFolder, booted
from tests.support.node import ROOT
from tests.support.wheels import build_wheel, copy_build_context
from tools.release.deb import build_package

pytestmark = [
    pytest.mark.needs("debootstrap", "dpkg-deb", "gcc"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can boot a folder"),
    pytest.mark.timeout(600),
]

DOCKERFILE: Final = (ROOT / "deploy" / "docker" / "Dockerfile").read_text(encoding="utf-8")
PYTHON: Final = "3.11"
"""Debian 12's."""

# Caches and logs of other programs, and the account files' backups that each change of them leaves.
CHANGING: Final = re.compile(r"/(tmp|var/(cache|lib/dpkg|log|tmp))/|/etc/.*-$")


@pytest.fixture
def package(tmp_path: Path) -> Path:
    directory = tmp_path / "package"
    copy_build_context(directory / "context", DOCKERFILE)
    wheel = build_wheel(directory / "context", directory, "99.dev1+g0123456789ab")
    return build_package(wheel, PYTHON, directory)


@pytest.fixture
def machine(debian12: Path) -> Iterator[BootedFolder]:
    with booted(debian12) as machine:
        yield machine


def next_revision(package: Path, target: Path) -> Path:
    """Return the same package with a higher version."""
    tree = target / "tree"
    subprocess.run(["dpkg-deb", "-R", str(package), str(tree)], check=True)
    control = tree / "DEBIAN" / "control"
    control.write_text(control.read_text().replace(f"-1+py{PYTHON}", f"-2+py{PYTHON}"))
    built = target / package.name.replace("-1+", "-2+")
    subprocess.run(["dpkg-deb", "-Znone", "-b", str(tree), str(built)], check=True, capture_output=True)
    return built


def install(machine: BootedFolder, package: Path) -> None:
    shutil.copy(package, machine.folder / "var" / "cache" / "package.deb")
    machine.run("dpkg", "--install", "/var/cache/package.deb")


def state(machine: BootedFolder) -> list[str]:
    return [machine.run("systemctl", each, "torchperfd", check=False) for each in ("is-enabled", "is-active")]


def page(machine: BootedFolder, port: int) -> str:
    program = (
        f"import urllib.request as u; print(u.urlopen('http://127.0.0.1:{port}/metrics').read().decode())"
    )
    return machine.run("python3", "-c", program)


def files(machine: BootedFolder) -> set[str]:
    found = machine.run("find", "/", "-xdev").splitlines()
    return {path for path in found if not CHANGING.match(path)}


def test_package_runs_as_a_service_until_it_is_purged(
    package: Path, machine: BootedFolder, tmp_path: Path
) -> None:
    before = files(machine)

    install(machine, package)
    assert state(machine) == ["enabled", "active"]
    process = machine.run("systemctl", "show", "--property=MainPID", "--value", "torchperfd")
    assert machine.run("stat", "--format=%U:%G", f"/proc/{process}") == "torchperfd:torchperfd"
    assert "torchperfd_build_info{" in page(machine, 9407)
    assert json.loads(machine.run("torchperfd", "ps", "--json", user="daemon"))["runs"] == []
    assert "hooks native" in machine.run("torchperfd", "version", user="daemon")
    modules = "find /usr/lib/torchperfd -name '*.so*' -exec ldd {} +"
    assert "not found" not in machine.run("sh", "-c", modules)

    configuration = machine.folder / "etc" / "torchperfd" / "config.toml"
    configuration.write_text(configuration.read_text() + 'metrics_address = "127.0.0.1:9500"\n')
    kept = machine.folder / "var" / "lib" / "torchperfd" / "captures" / "kept"
    kept.touch()
    upgrade = next_revision(package, tmp_path)
    install(machine, upgrade)
    assert state(machine) == ["enabled", "active"]
    assert f"-2+py{PYTHON}" in machine.run("dpkg-query", "--show", "torchperfd")
    assert "torchperfd_build_info{" in page(machine, 9500)
    assert kept.exists()

    machine.run("systemctl", "disable", "--now", "torchperfd")
    install(machine, upgrade)
    assert state(machine) == ["disabled", "inactive"]

    machine.run("dpkg", "--purge", "torchperfd")
    machine.run("test", "!", "-e", "/run/torchperfd")
    assert files(machine) == before
    assert "torchperfd" not in machine.run("getent", "passwd") + machine.run("getent", "group")
