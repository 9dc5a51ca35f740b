"""Compile what is in C where a compiler is at hand; without one the package works too."""

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
}
"""Modules without their ending, and their sources."""


class CompileHook(BuildHookInterface):
    """Puts each module's ``<name>.abi3.so`` into the source tree, and into the wheel.

    They use the limited API of CPython 3.11: one wheel serves that version and all later ones.
    """

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile; say so where that is not possible. Add the files that commands read."""
        if version == "standard":  # an editable installation reads the checkout
            build_data["force_include"] |= {
                str(Path(self.root, source)): target for source, target in self.config["exported"].items()
            }
        if not sys.platform.startswith("linux") or sysconfig.get_config_var("Py_GIL_DISABLED"):
            return
        for module, pattern in MODULES.items():
            target = Path(f"{module}.abi3.so")
            for older in Path(self.root).glob(f"{module}.cpython-*.so"):
                older.unlink()  # of an earlier version: it would be imported first
            if reason := _compile(Path(self.root), pattern, target):
                self.app.display_warning(f"{module} is left out, and training will pay more: {reason}")
                continue
            build_data["artifacts"].append(str(target))
            build_data["pure_python"] = False
            build_data["tag"] = f"cp311-abi3-{re.sub('[-.]', '_', sysconfig.get_platform())}"


def _compile(root: Path, pattern: str, target: Path) -> str:
    """Compile one module; return why not, empty when it is there."""
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    command = [
        *compiler, "-O2", "-fPIC", "-fno-plt", "-fvisibility=hidden", "-shared", "-Wall", "-Wextra",
        "-Wno-missing-field-initializers", "-Wno-unused-parameter", "-Wno-cast-function-type",
        f"-I{sysconfig.get_path('include')}", *map(str, sorted(root.glob(pattern))),
        "-o", str(root / target), "-lrt",
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        reason = (done.stderr or f"{command[0]} failed") if done.returncode else ""
    except OSError as error:
        reason = str(error)
    if reason:
        (root / target).unlink(missing_ok=True)
    return reason
