"""The environment of the peers: beside the project's, on top of its torch."""

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import Final

VENV: Final = Path(__file__).resolve().parents[2] / ".venv-peers"
PYTHON: Final = VENV / "bin" / "python"


def missing(requirement: str) -> bool:
    """Return whether a distribution, pinned as ``name==version``, is not installed."""
    name, _, version = requirement.partition("==")
    code = f"from importlib.metadata import version; assert version({name!r}) == {version!r}"
    return not PYTHON.exists() or _run(str(PYTHON), "-c", code).returncode != 0


def install(requirement: str) -> str:
    """Install a distribution; return why not, empty when it worked."""
    if not PYTHON.exists():
        venv.create(VENV, with_pip=True)
        # The project's packages come second: a peer may bring its own version of anything but torch.
        purelib = sysconfig.get_path("purelib", vars={"base": str(VENV), "platbase": str(VENV)})
        (Path(purelib) / "project.pth").write_text(sysconfig.get_path("purelib") + "\n")
    print(f"installing {requirement} into {VENV.name}", file=sys.stderr)
    done = _run(str(PYTHON), "-m", "pip", "install", "-q", "--disable-pip-version-check", requirement)
    if done.returncode == 0:
        return ""
    lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["pip failed"]
    return lines[-1]


def _run(*command: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, capture_output=True, text=True, check=False)
