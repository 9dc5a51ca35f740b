"""One trial: a script with and without torchperfd, and what differs."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.trials.faults import FAULTS, Fault
from benchmarks.trials.script_names import SCRIPT
from tests.support.node import Node

LIMIT_S: Final = 90.0
"""A script that takes longer hangs; alone it takes three seconds."""
EXIT_LIMIT_S: Final = 1.0
_BEGINS_WITHIN_S: Final = 30.0
_CUT_SHORT: Final = frozenset(
    {"raising_timeouts", "killed_worker", "calls_in_handler", "daemonised", "reattached"}
)
"""Behaviours whose steps are not all steps of a loop that the account could be compared with."""
_INEXACT: Final = frozenset({"raising_timeouts"})
"""Behaviours whose losses differ without torchperfd, too: a timeout cuts off what torch does not restore."""
_MADE_AFTERWARDS: Final = frozenset({"trains_at_exit"})
_EXPECTED_LINES: Final = re.compile(
    r"cannot write the (trace|manifest)|not connected to the socket|was forked from one|^USDT:|output_json"
    r"|External init callback must run in same thread|Toggling CPU activity with GPU activity on"
)
"""Warnings that a user is to see, of what fails; and what torch's profiler writes of itself."""


@dataclass(frozen=True, slots=True)
class Trial:
    behaviour: str
    fault: str
    is_run: bool
    is_portable: bool
    seed: int

    def __str__(self) -> str:
        how = "run" if self.is_run else "attach"
        half = "reference" if self.is_portable else "native"
        return f"{self.behaviour} / {self.fault} / {how} / {half} / seed {self.seed}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a script did. ``code`` is None where it hung; then stderr has the stacks."""

    code: int | None
    stderr: str
    result: dict[str, Any]


def run_bare(trial: Trial) -> Outcome:
    """Run the script without torchperfd; once more, twice at most, if it crashes by itself.

    faulthandler dumps a traceback without the interpreter's lock, which crashes a busy script now and then.
    """
    for last in (False, False, True):
        node = Node()
        try:
            outcome = _run(node, trial, Fault(daemon=False), [sys.executable, str(SCRIPT)], ())
        finally:
            node.close()
        if last or outcome.code != -signal.SIGSEGV:
            break
    return outcome


def run(trial: Trial) -> Outcome:
    """Run the script with torchperfd and the trial's fault."""
    node, fault = Node(), FAULTS[trial.fault]
    try:
        fault.before(node)
        if fault.daemon:
            node.start_daemon()
        if trial.is_run:
            options = ["--no-daemon", "--quiet"]
            command = [sys.executable, "-m", "torchperfd", "run", *options, str(SCRIPT)]
            return _run(node, trial, fault, command, ())
        return _run(node, trial, fault, [sys.executable, str(SCRIPT)], ("attach",))
    finally:
        node.close()


def compare(trial: Trial, bare: Outcome, outcome: Outcome) -> list[str]:
    """Return what torchperfd has changed, one line each."""
    if outcome.code is None:
        return [f"hangs: {outcome.stderr[-6000:]}"]
    found = []
    if outcome.code != bare.code:
        found.append(f"exit code {outcome.code}, without torchperfd {bare.code}: {outcome.stderr[-1500:]}")
    for name in ("steps",) if trial.behaviour in _INEXACT else ("losses", "steps"):
        if outcome.result.get(name) != bare.result.get(name):
            found.append(f"{name} {outcome.result.get(name)}, without torchperfd {bare.result.get(name)}")
    raised, seen = outcome.result.get("raised"), outcome.result.get("seen")
    if raised != seen:
        found.append(f"{raised} exceptions raised, {seen} seen")
    known = {_normal(line) for line in bare.stderr.splitlines()}
    lines = [line for line in outcome.stderr.splitlines() if _normal(line) not in known]
    if bad := [line for line in lines if not _EXPECTED_LINES.search(line)]:
        found.append(f"stderr: {bad[:25]}")
    account, steps = outcome.result.get("account"), outcome.result.get("steps")
    expected = steps - 5 if trial.behaviour in _MADE_AFTERWARDS and steps else steps
    if account is not None and trial.behaviour not in _CUT_SHORT and not 0 <= expected - account <= 1:
        found.append(f"account of {account} steps, made {expected}")
    took, took_bare = outcome.result.get("exit"), bare.result.get("exit")
    if took is not None and took_bare is not None and took - took_bare > EXIT_LIMIT_S:
        found.append(f"exit {took - took_bare:.2f} s later")
    return found


def _run(node: Node, trial: Trial, fault: Fault, command: Sequence[str], arguments: Sequence[str]) -> Outcome:
    results = node.directory / "results.json"
    env = {**node.env, **fault.env, "PYTHONFAULTHANDLER": "1"}
    if trial.is_portable:
        env["TRIAL_PORTABLE"] = "1"
    site = str(Path(__file__).with_name("site"))
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (site, env.get("PYTHONPATH", ""))))
    stderr_path = node.directory / "stderr"
    with stderr_path.open("wb") as stderr:
        process = subprocess.Popen(
            [*command, trial.behaviour, str(trial.seed), str(results), *arguments],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
        )
        _wait_for_training(process, results.with_name(f"{results.name}.began"))
        if process.poll() is None:
            fault.during(node)
        code: int | None
        try:
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)  # faulthandler writes the stacks
            code = None
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    result = json.loads(results.read_text()) if results.exists() else {}
    return Outcome(code, stderr_path.read_text(errors="replace"), result)


def _wait_for_training(process: "subprocess.Popen[bytes]", began: Path) -> None:
    deadline = time.monotonic() + _BEGINS_WITHIN_S
    while process.poll() is None and not began.exists() and time.monotonic() < deadline:
        time.sleep(0.02)


def _normal(line: str) -> str:
    """Return a line without what differs from run to run."""
    return re.sub(r"0x[0-9a-f]+|\d+", "N", line.strip())
