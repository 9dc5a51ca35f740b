"""The environment of the peers: an own one, since they bring pandas and more."""

import subprocess
import sys
import venv
from pathlib import Path
from typing import Final

VENV: Final = Path(__file__).resolve().parents[2] / ".venv-peers-analysis"
PYTHON: Final = VENV / "bin" / "python"
HTA: Final = "HolisticTraceAnalysis==0.5.0"


def install(requirement: str) -> str:
    """Install a distribution unless it is there; return why not, empty when it is there now."""
    name, _, version = requirement.partition("==")
    code = f"from importlib.metadata import version; assert version({name!r}) == {version!r}"
    if PYTHON.exists() and _run(str(PYTHON), "-c", code).returncode == 0:
        return ""
    if not PYTHON.exists():
        venv.create(VENV, with_pip=True)
    print(f"installing {requirement} into {VENV.name}", file=sys.stderr)
    done = _run(str(PYTHON), "-m", "pip", "install", "-q", "--disable-pip-version-check", requirement)
    if done.returncode == 0:
        return ""
    lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["pip failed"]
    return lines[-1]


def _run(*command: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, capture_output=True, text=True, check=False)
