"""Prove on a GPU what torchperfd claims about GPUs: one command, about ten minutes.

    make gpu-proof
    python -m benchmarks.gpu_proof [--only CHECK,CHECK] [--out FILE]

Needs torch and what the package itself needs, and no network. Each check runs in a process of its own: one
that fails, hangs or crashes costs its own result alone. Results are stored as JSON, a file per card, and
docs/gpu-results.md is written from those files. Exits 1 when something did not hold.

Without a GPU it is a rehearsal: the same code with little work. Nothing is stored, and nothing is shown of
a GPU; it exits 1 when a check cannot run.
"""

import argparse
import faulthandler
import json
import os
import subprocess
import sys
import time
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import torch
from benchmarks.gpu_proof import page
from benchmarks.gpu_proof.checks import CHECKS
from benchmarks.gpu_proof.machine import Machine

RESULTS: Final = Path(__file__).parent / "results"
SCHEMA: Final = "torchperfd.gpu_proof/1"

_TO_REPORT_SECONDS: Final = 3


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_proof", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--only", type=lambda names: names.split(","), help=f"some of {', '.join(CHECKS)}")
    parser.add_argument("--out", type=Path, help="where to store the results; by default beside the others")
    parser.add_argument("--run-here", choices=CHECKS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    machine = Machine(is_rehearsal=not torch.cuda.is_available())
    if arguments.run_here:
        module = _module(arguments.run_here)
        # So that one who reads the log sees where it was when its time was over.
        faulthandler.dump_traceback_later(module.SECONDS - _TO_REPORT_SECONDS, exit=True)
        print(json.dumps(module.run(machine).to_json()))
        return 0
    described = machine.describe()
    print(", ".join(f"{name} {value}" for name, value in described.items()), flush=True)
    path = arguments.out or RESULTS / f"{described['device'].lower().replace(' ', '-')}.json"
    results = {}
    for name in arguments.only or CHECKS:
        results[name] = _checked(name)
        if not machine.is_rehearsal:  # after each: the machine may be taken away
            path.parent.mkdir(parents=True, exist_ok=True)
            document = _merged(path, described, results)
            path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
            page.write(RESULTS)
    return 0 if all(page.is_fine(result) for result in results.values()) else 1


def _module(name: str) -> Any:
    return import_module(f"benchmarks.gpu_proof.checks.{name}")


def _checked(name: str) -> dict[str, Any]:
    """Run one check in a process of its own; print and return what it found, or why it found nothing."""
    module = _module(name)
    began = time.monotonic()
    result: dict[str, Any] = {"title": module.TITLE}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.gpu_proof", "--run-here", name],
            env=os.environ | {"PYTHONWARNINGS": "ignore"},
            stdout=subprocess.PIPE,
            text=True,
            timeout=module.SECONDS,
        )
        if done.returncode:
            result["error"] = f"exit code {done.returncode}"
        else:
            result["outcome"] = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        result["error"] = f"not done after {module.SECONDS} s"
    result["seconds"] = round(time.monotonic() - began, 1)
    print("\n".join(page.check_lines(result)), flush=True)
    return result


def _merged(path: Path, machine: dict[str, str], results: dict[str, Any]) -> dict[str, Any]:
    """Return these results with those of other checks of the same machine, if the file has any."""
    before = json.loads(path.read_text()) if path.exists() else {}
    checks = before.get("checks", {}) if before.get("machine") == machine else {}
    merged = checks | results
    return {
        "schema": SCHEMA,
        "machine": machine,
        "date": datetime.now(UTC).date().isoformat(),
        "checks": {name: merged[name] for name in CHECKS if name in merged},
    }


if __name__ == "__main__":
    sys.exit(main())
