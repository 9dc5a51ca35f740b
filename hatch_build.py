"""Write version and commit, and compile what is in C; the package works without a compiler, too."""

import os
import re
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

MODULES = {
    "client/torchperfd/events/_native": "client/torchperfd/events/native/*.c",
    "client/torchperfd/steps/_templates": "client/torchperfd/steps/_templates.c",
    "client/torchperfd/launch/_sigterm": "client/torchperfd/launch/_sigterm.c",
    "daemon/torchperfd_daemon/analysis/_native": "daemon/torchperfd_daemon/analysis/native/*.c",
}
"""Modules without their ending, and their sources."""

FURTHER = {"daemon/torchperfd_daemon/analysis/_native": ("-O3", "-flto")}
"""Options that a module has if the compiler knows them. The parser of traces is many small functions in
several files, which are a sixth faster when they are inlined."""


BUILD_FILE = "client/torchperfd/_build.py"
"""Version and commit of the build, which ``torchperfd._version`` imports."""

REQUIRE_NATIVE = "TORCHPERFD_REQUIRE_NATIVE"
"""Environment variable: with ``1``, a build that cannot compile a module fails instead of leaving it out."""


class BuildHook(BuildHookInterface):
    """Puts version, commit and each module's ``<name>.abi3.so`` into the source tree, and into the wheel.

    The modules use the limited API of CPython 3.11: one wheel serves that version and all later ones.
    """

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write the version, compile or report why not, and add the files that commands read."""
        write_version(Path(self.root), self.metadata.version)
        build_data["artifacts"].append(BUILD_FILE)
        if self.target_name == "sdist":
            return
        if version == "standard":  # an editable installation reads the checkout
            build_data["force_include"] |= {
                str(Path(self.root, source)): target for source, target in self.config["exported"].items()
            }
        required = os.environ.get(REQUIRE_NATIVE) == "1"
        if not sys.platform.startswith("linux") or sysconfig.get_config_var("Py_GIL_DISABLED"):
            if required:
                raise RuntimeError(
                    f"{REQUIRE_NATIVE}=1, but C modules are only for CPython with a GIL on Linux"
                )
            return
        for module, pattern in MODULES.items():
            target = Path(f"{module}.abi3.so")
            for older in Path(self.root).glob(f"{module}.cpython-*.so"):
                older.unlink()  # of an earlier version: it would be imported first
            if reason := _compile(Path(self.root), module, pattern, target):
                if required:
                    raise RuntimeError(f"{REQUIRE_NATIVE}=1, but {module} cannot be compiled: {reason}")
                self.app.display_warning(f"{module} is left out; Python does the same more slowly: {reason}")
                continue
            build_data["artifacts"].append(str(target))
            build_data["pure_python"] = False
            # What a release compiles for other machines, it names in _PYTHON_HOST_PLATFORM.
            build_data["tag"] = f"cp311-abi3-{re.sub('[-.]', '_', sysconfig.get_platform())}"


def write_version(root: Path, version: str) -> None:
    """Write version and commit; a source distribution, which has no git, keeps the commit that it has."""
    file = root / BUILD_FILE
    commit = _commit(root)
    if not commit:
        commit = (re.search(r"\+g([0-9a-f]+)", version) or ["", ""])[1]
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        kept = (re.search(r'REVISION = "([0-9a-f]*)"', text) or ["", ""])[1]
        # The version has fewer digits. A file of another commit is from an earlier build.
        commit = kept if kept.startswith(commit) else commit
    file.write_text(
        f'"""Written by the build."""\n\nVERSION = "{version}"\nREVISION = "{commit[:12]}"\n',
        encoding="utf-8",
    )


def _commit(root: Path) -> str:
    """Return the commit that is checked out at ``root``; empty if that is no checkout, or git is missing."""
    if not (root / ".git").exists():
        return ""
    command = ["git", "-C", str(root), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _compile(root: Path, module: str, pattern: str, target: Path) -> str:
    """Compile one module; return why not, empty when it is there."""
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    command = [
        *compiler, "-O2", "-fPIC", "-fno-plt", "-fvisibility=hidden", "-shared", "-Wall", "-Wextra",
        "-ffp-contract=off",  # times are rounded as in Python
        "-Wno-missing-field-initializers", "-Wno-unused-parameter", "-Wno-cast-function-type",
        f"-I{sysconfig.get_path('include')}", *map(str, sorted(root.glob(pattern))),
        "-o", str(root / target), "-lrt",
    ]  # fmt: skip
    reason = _run(command + list(FURTHER.get(module, ())))
    if reason and module in FURTHER:
        reason = _run(command)
    if reason:
        (root / target).unlink(missing_ok=True)
    return reason


def _run(command: list[str]) -> str:
    """Run the compiler; return why it failed, empty when it did not."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        return str(error)
    return (done.stderr or f"{command[0]} failed") if done.returncode else ""
