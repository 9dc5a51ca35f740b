"""The verdict of ``torchperfd run`` on a training that becomes slow: the cause, and what it costs.

Each training is a process of its own, with the daemon that ``torchperfd run`` starts for it, which reads the
GPU through NVML. The training measures its own steps before the fault and with it.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu_proof.machine import Machine
from benchmarks.gpu_proof.outcome import Bound, Outcome
from benchmarks.gpu_proof.slow_run import (
    COLLECTIONS,
    HOST_BOUND,
    SLOW_LOADER,
    SYNCHRONISATION,
)

TITLE: Final = "The verdict on a run that becomes slow"
SECONDS: Final = 170

WITHIN: Final = 0.10
"""How far the cost of a cause may be from the measured one, as a part of that."""
_EACH_SECONDS: Final = 60


@dataclass(frozen=True, slots=True)
class Slow:
    """A fault and the cause that is right for it.

    Attributes:
        fault: Name of a fault of :mod:`benchmarks.gpu_proof.slow_run`.
        what: The fault in words.
        cause: Value of the right cause.
    """

    fault: str
    what: str
    cause: str


RUNS: Final = (
    Slow(
        SLOW_LOADER, "the loader takes 12 ms of each step, part of it while the device works", "input-bound"
    ),
    Slow(SYNCHRONISATION, "the norm of each gradient is read", "needless synchronisation"),
    Slow(COLLECTIONS, "every fourth step collects 400,000 objects", "garbage collection"),
    Slow(HOST_BOUND, "ResNet-18 on 8 images of 32 x 32", "host-bound"),
)


def run(machine: Machine) -> Outcome:
    """Train once per fault, and compare."""
    outcome = Outcome(["fault", "step without", "with it", "cause named", "its cost", "in truth"])
    for slow in RUNS[: machine.amount(len(RUNS), 1)]:
        try:
            measured, verdict = _trained(slow.fault, machine)
        except (subprocess.SubprocessError, OSError, ValueError) as error:
            outcome.rows.append([slow.what, *[""] * 5])
            outcome.bounds.append(Bound(f"{slow.what}: the run ends as it should; {error}", held=False))
        else:
            _add(outcome, slow, measured, verdict, machine)
    outcome.notes.append(
        "GPT of 12 layers on 8 sequences of 1,024 tokens, in bfloat16, where not said otherwise."
    )
    return outcome


def _trained(fault: str, machine: Machine) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what one training has measured, and the verdict on it.

    Raises:
        SubprocessError: It failed, or did not end.
        ValueError: It left no verdict.
    """
    with tempfile.TemporaryDirectory(prefix="tpd-") as folder:
        measured, report = Path(folder, "measured.json"), Path(folder, "report.json")
        done = subprocess.run(
            [
                *(sys.executable, "-m", "torchperfd", "run", "--report", str(report)),
                *("-m", "benchmarks.gpu_proof.slow_run", fault, str(measured)),
                *(["rehearsal"] if machine.is_rehearsal else []),
            ],
            env=os.environ | {"XDG_RUNTIME_DIR": folder, "TORCHPERFD_CAPTURES_DIR": folder},
            capture_output=True,
            text=True,
            timeout=_EACH_SECONDS,
        )
        if done.returncode:
            raise ValueError(f"exit code {done.returncode}: {done.stderr.strip()[-300:]}")
        print(done.stderr, file=sys.stderr)
        verdict = json.loads(report.read_text())["verdict"]
        if verdict is None:
            raise ValueError("no daemon answered")
        return json.loads(measured.read_text()), verdict


def _add(
    outcome: Outcome, slow: Slow, measured: dict[str, Any], verdict: dict[str, Any], machine: Machine
) -> None:
    well, faulty, cost = measured["well"], measured["faulty"], verdict["cost_seconds_per_step"]
    truth = None if well is None else faulty - well
    names_cause = verdict["cause"] == slow.cause
    outcome.rows.append(
        [
            slow.what,
            *("" if each is None else f"{1e3 * each:.2f} ms" for each in (well, faulty)),
            verdict["cause"],
            f"{1e3 * cost:.2f} ms" if cost else "",
            "" if truth is None else f"{1e3 * truth:.2f} ms",
        ]
    )
    is_shown = not machine.is_rehearsal
    text = f"{slow.what}: the cause is {slow.cause}; {verdict['summary']}"
    outcome.bounds.append(Bound(text, names_cause if is_shown else None))
    if truth is not None:
        off = cost / truth - 1 if truth else float("inf")
        text = f"{slow.what}: its cost is within {WITHIN:.0%} of the measured one; off by {off:+.0%}"
        outcome.bounds.append(Bound(text, (names_cause and abs(off) <= WITHIN) if is_shown else None))
