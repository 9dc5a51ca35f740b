"""Compile the C half of the tape where a compiler is at hand; without one the package works too."""

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = Path("client/torchperfd/tape/_native.c")


class TapeBuildHook(BuildHookInterface):
    """Puts ``_native.<abi>.so`` beside its source, and into the wheel."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile; say so where that is not possible."""
        if not sys.platform.startswith("linux") or sysconfig.get_config_var("Py_GIL_DISABLED"):
            return
        root = Path(self.root)
        target = (root / SOURCE).with_name("_native" + sysconfig.get_config_var("EXT_SUFFIX"))
        compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
        command = [
            *compiler, "-O2", "-fPIC", "-fno-plt", "-shared", "-Wall", "-Wextra",
            "-Wno-missing-field-initializers", "-Wno-unused-parameter", "-Wno-cast-function-type",
            f"-I{sysconfig.get_path('include')}", str(root / SOURCE), "-o", str(target),
        ]  # fmt: skip
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            reason = done.stderr if done.returncode else ""
        except OSError as error:
            reason = str(error)
        if reason:
            target.unlink(missing_ok=True)
            self.app.display_warning(f"the C half of the tape is left out, hooks will cost more: {reason}")
            return
        build_data["artifacts"].append(str(target.relative_to(root)))
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
