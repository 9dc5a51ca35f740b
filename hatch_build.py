"""Compile what is in C where a compiler is at hand; without one the package works too."""

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCES = (Path("client/torchperfd/tape/_native.c"), Path("client/torchperfd/_cycles.c"))


class CompileHook(BuildHookInterface):
    """Puts a module's ``<name>.<abi>.so`` beside its source, and into the wheel."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile; say so where that is not possible."""
        if not sys.platform.startswith("linux") or sysconfig.get_config_var("Py_GIL_DISABLED"):
            return
        for source in SOURCES:
            target = source.with_name(source.stem + sysconfig.get_config_var("EXT_SUFFIX"))
            if reason := _compile(Path(self.root), source, target):
                self.app.display_warning(f"{source} is left out, and training will pay more: {reason}")
                continue
            build_data["artifacts"].append(str(target))
            build_data["pure_python"] = False
            build_data["infer_tag"] = True


def _compile(root: Path, source: Path, target: Path) -> str:
    """Compile one module; return why not, empty when it is there."""
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    command = [
        *compiler, "-O2", "-fPIC", "-fno-plt", "-shared", "-Wall", "-Wextra",
        "-Wno-missing-field-initializers", "-Wno-unused-parameter", "-Wno-cast-function-type",
        f"-I{sysconfig.get_path('include')}", str(root / source), "-o", str(root / target),
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        reason = (done.stderr or f"{command[0]} failed") if done.returncode else ""
    except OSError as error:
        reason = str(error)
    if reason:
        (root / target).unlink(missing_ok=True)
    return reason
