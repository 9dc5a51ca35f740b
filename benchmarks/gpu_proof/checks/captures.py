"""Five captures in a row: what each costs, the steps after it, and what its trace holds."""

import json
import os
import statistics
import subprocess
import sys
from typing import Any, Final

from benchmarks.gpu_proof.machine import Machine
from benchmarks.gpu_proof.outcome import Bound, Outcome

TITLE: Final = "Five captures in a row, and the steps after them"
SECONDS: Final = 150

CAPTURES: Final = 5
SLOWER_BELOW: Final = 0.01
BUSY_WITHIN: Final = 0.001
_EACH_SECONDS: Final = 60

_WAYS: Final = (
    ("no capture", 0, "eager", None),
    ("captures, CUPTI stays", CAPTURES, "eager", "0"),
    ("captures", CAPTURES, "eager", None),
    ("CUDA graphs, captures", CAPTURES, "graphs", None),
)


def run(machine: Machine) -> Outcome:
    """Train in one process per way, and compare the steps before and after captures."""
    outcome = Outcome(
        [
            *("ResNet-18", "step before", "after each", "change", "a launch before", "after"),
            *("longest step", "pause", "kernels of launches"),
        ]
    )
    for name, captures, mode, teardown in _WAYS:
        if machine.is_rehearsal and (mode == "graphs" or teardown):
            continue
        found = _trained(machine, captures, mode, teardown)
        if isinstance(found, str):
            outcome.rows.append([name, found, *[""] * 7])
            outcome.bounds.append(Bound(f"{name}: training ends as it should; {found}", held=False))
        else:
            _add(outcome, name, found, machine)
    return outcome


def _trained(machine: Machine, captures: int, mode: str, teardown: str | None) -> dict[str, Any] | str:
    """Return what one process printed, or how it failed."""
    environment = {name: value for name, value in os.environ.items() if name != "TEARDOWN_CUPTI"}
    if teardown is not None:
        environment["TEARDOWN_CUPTI"] = teardown
    command = [sys.executable, "-m", "benchmarks.gpu_proof.captured_training", str(captures), mode]
    try:
        done = subprocess.run(
            [*command, *(["rehearsal"] if machine.is_rehearsal else [])],
            env=environment,
            capture_output=True,
            text=True,
            timeout=_EACH_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"not done after {_EACH_SECONDS} s"
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        return f"exit code {done.returncode}: {last[:200]}"
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _add(outcome: Outcome, name: str, found: dict[str, Any], machine: Machine) -> None:
    before, after, made = found["before_ms"], found["after_ms"], found["captures"]
    change = statistics.median(after) / before - 1
    kernels = ", ".join(f"{capture['kernels']} of {capture['launches']}" for capture in made)
    outcome.rows.append(
        [
            name,
            f"{before:.2f} ms",
            ", ".join(f"{each:.2f}" for each in after) + " ms",
            f"{change:+.1%}",
            *(f"{each:.2f} µs" for each in found["launches_us"]),
            f"{max((capture['longest_ms'] for capture in made), default=0.0):.0f} ms" if made else "",
            f"{max((capture['pause_ms'] for capture in made), default=0.0):.0f} ms" if made else "",
            kernels,
        ]
    )
    if not made:
        return
    is_shown = not machine.is_rehearsal
    launch = found["launches_us"][1] / found["launches_us"][0] - 1
    text = f"{name}: launches are back within {SLOWER_BELOW:.0%} after captures; {launch:+.1%}"
    outcome.bounds.append(Bound(text, launch <= SLOWER_BELOW if is_shown else None))
    text = f"{name}: steps are back within {SLOWER_BELOW:.0%} after captures; median {change:+.1%}"
    outcome.bounds.append(Bound(text, change <= SLOWER_BELOW if is_shown else None))
    without = sum(capture["kernels"] < capture["launches"] > 0 or not capture["kernels"] for capture in made)
    text = f"{name}: every trace holds the kernels of its launches; {without} of {len(made)} do not"
    outcome.bounds.append(Bound(text, not without if is_shown else None))
    off = max(
        abs(capture[f"analysed_{what}"] - capture[f"counted_{what}"]) / (capture[f"counted_{what}"] or 1.0)
        for capture in made
        for what in ("busy_us", "kernels_us")
    )
    text = f"{name}: the analyser's device time is what counting gives; off by {off:.3%}"
    outcome.bounds.append(Bound(text, off <= BUSY_WITHIN if is_shown else None))
