"""Wheels of this checkout and of the version before it, unpacked for ``PYTHONPATH``."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

from tests.support.node import ROOT

BEFORE_TAGS: Final = "6ba749a4053008b61bf8bb65f91e2f97f0b565d6"
"""The version before this one, as long as no tag names it: a commit of the same protocol."""


def copy_build_context(target: Path, dockerfile: str) -> None:
    """Copy what `.dockerignore` lets into the image's build and the Dockerfile copies from there."""
    rules = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    allowed = {rule[1:] for rule in rules if rule.startswith("!")}
    excluded = [rule for rule in rules if rule.startswith("**/") or "/" in rule]

    def ignored(directory: str, names: list[str]) -> set[str]:
        inside = Path(directory).relative_to(ROOT)
        return {
            name
            for name in names
            if any(
                fnmatch(name, rule[3:]) if rule.startswith("**/") else str(inside / name) == rule
                for rule in excluded
            )
        }

    for copied in re.findall(r"^COPY (.+)$", dockerfile, re.MULTILINE):
        for source in copied.split()[:-1]:
            if source not in allowed:
                continue
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, target / source, ignore=ignored)
            else:
                (target / source).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / source, target / source)


def previous_version() -> str | None:
    """Return the newest tag before this commit, or a commit before all tags; None in a shallow clone."""
    for question in (
        ("describe", "--tags", "--abbrev=0", "--match", "v*", "HEAD^"),
        ("rev-parse", "--verify", "-q", f"{BEFORE_TAGS}^{{commit}}"),
    ):
        done = subprocess.run(
            ["git", "-C", str(ROOT), *question], capture_output=True, text=True, check=False
        )
        if done.returncode == 0:
            return done.stdout.strip()
    return None


def check_out(commit: str, target: Path) -> None:
    """Check a commit out into a new directory."""
    subprocess.run(["git", "clone", "-q", "--shared", "-n", str(ROOT), str(target)], check=True)
    subprocess.run(["git", "-C", str(target), "checkout", "-q", commit], check=True, capture_output=True)


def build_wheel(tree: Path, target: Path, version: str | None = None) -> Path:
    """Build the wheel of a directory with the build tools of this environment, and its C modules with it.

    Args:
        tree: The sources.
        target: Directory of the wheel.
        version: The version, where ``tree`` has no git.
    """
    environ = os.environ | {"TORCHPERFD_REQUIRE_NATIVE": "1"}
    if version is not None:
        environ["SETUPTOOLS_SCM_PRETEND_VERSION_FOR_TORCHPERFD"] = version
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*command, "-w", str(target), str(tree)], env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = target.glob("*.whl")
    return wheel


def unpack(wheel: Path, target: Path) -> Path:
    """Unpack a wheel into a directory that ``PYTHONPATH`` can name."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target
