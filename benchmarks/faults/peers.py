"""The answers of other tools for the same jobs, run in a separate environment."""

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.faults import journal
from benchmarks.faults.catalog import HANG, PERIOD_STEPS, Plan
from benchmarks.faults.journal import Measured
from benchmarks.faults.trial import JOB, Answer, Trial
from benchmarks.overhead import peers
from tests.support.node import ROOT, free_port

from torchperfd_daemon.diagnosis.verdict import Cause

TRACEML: Final = "traceml-ai==0.5.0"
PROBING: Final = "probing==0.2.4"
NVRX: Final = "nvidia-resiliency-ext==0.4.1"

_TIMEOUT_SECONDS: Final = 240.0

_CAUSES: Final = {
    "INPUT_BOUND": Cause.INPUT_BOUND,
    "INPUT_STRAGGLER": Cause.INPUT_BOUND,
    "COMPUTE_STRAGGLER": Cause.SLOW_RANK,
    "STRAGGLER": Cause.SLOW_RANK,
    "RESIDUAL_HEAVY": Cause.UNKNOWN,
    "NO_CLEAR_PERFORMANCE_BOTTLENECK": Cause.NONE,
    "COMPUTE_BOUND": Cause.NONE,
}
"""TraceML's terms as causes. A run that it calls compute-bound counts as healthy."""


def others() -> dict[str, str]:
    """Return why each of the other tools names no cause for these jobs."""
    said = {}
    if why := _absent(PROBING):
        said[PROBING] = f"does not install: {why}"
    else:
        said[PROBING] = "installs; answers queries and shows stacks, but names no cause and no rank"
    if why := _absent(NVRX):
        said[NVRX] = f"does not install: {why}"
    else:
        code = "from nvidia_resiliency_ext.straggler.cupti import CuptiManager; CuptiManager()"
        done = subprocess.run([str(peers.PYTHON), "-c", code], capture_output=True, text=True, check=False)
        last = (done.stderr.strip().splitlines() or [""])[-1]
        said[NVRX] = (
            f"installs, and does not start: {last}"
            if done.returncode
            else "starts; scores ranks by sections that the script marks, names no cause"
        )
    return said


def absent() -> str:
    """Install TraceML unless it is there; return why it cannot be, empty when it is."""
    return _absent(TRACEML)


def _absent(requirement: str) -> str:
    return peers.install(requirement) if peers.missing(requirement) else ""


def run(plan: Plan) -> Trial:
    """Run a job under TraceML to its end, and return the first diagnosis of its summary.

    The summary comes when a run ends, so that one that hangs has none: such a job is not run.
    """
    if plan.cause == HANG:
        return Trial(plan, Measured(0.0, 0.0, 0.0, 0.0), ())
    with tempfile.TemporaryDirectory(prefix="tpd-") as name:
        directory = Path(name)
        (directory / "plan.json").write_text(json.dumps(plan.to_dict()))
        failure = _traceml(plan, directory)
        logs = {rank: journal.read(directory / f"rank{rank}.log") for rank in range(plan.ranks)}
        onset = journal.onset_unix(logs, plan.onset) or 0.0
        summaries = list(directory.rglob("final_summary.json"))
        if not summaries:
            failure = failure or "it wrote no summary"
        return Trial(
            plan=plan,
            measured=journal.measure(logs, plan.onset, PERIOD_STEPS),
            answers=tuple(answer(json.loads(path.read_text()), time.time() - onset) for path in summaries),
            failure="" if summaries else f"under TraceML: {failure}",
        )


def _traceml(plan: Plan, directory: Path) -> str:
    """Run the job; return why it did not end well."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    paths = (str(ROOT), str(ROOT / "client"), str(ROOT / "daemon"), str(ROOT / "cli"))
    with (directory / "job.log").open("wb") as log:
        job = subprocess.Popen(
            [
                *(str(peers.VENV / "bin" / "traceml"), "run", "--mode", "summary"),
                *("--nproc-per-node", str(plan.ranks), "--master-port", str(free_port())),
                *("--aggregator-port", str(free_port()), "--logs-dir", str(directory / "logs")),
                *("--no-save-training-output", str(JOB)),
                *("--args", str(directory / "plan.json"), str(directory), "traceml"),
            ],
            env={**environment, "PYTHONPATH": os.pathsep.join(paths)},
            stdout=log,
            stderr=log,
            cwd=directory,
        )
        try:
            code = job.wait(_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            job.terminate()
            job.wait()
            return f"not over after {_TIMEOUT_SECONDS:.0f} s"
    said = Path(log.name).read_text(errors="replace").strip().splitlines()
    errors = [line for line in said if "Error" in line] or said[-1:]
    return f"ended with {code}: {errors[0] if errors else ''}" if code else ""


def answer(summary: Mapping[str, Any], after_onset: float) -> Answer:
    """Return a summary's first diagnosis as an answer."""
    primary = summary["primary_diagnosis"]
    kind = str(primary["kind"])
    evidence = primary.get("evidence") or {}
    compared = evidence if "worst" in evidence else next(iter(evidence.get("comparisons") or ()), {})
    worst = (compared.get("worst") or {}).get("rank")
    cause = _CAUSES.get(kind, Cause.UNKNOWN)
    if cause is Cause.NONE and "CREEP" in str(_kind(summary, "step_memory")):
        cause = Cause.MEMORY_PRESSURE
    return Answer(
        after_onset=after_onset,
        cause=cause.value,
        rank=int(worst) if worst is not None and "STRAGGLER" in kind else None,
        cost=None,
        evidence=kind,
    )


def _kind(summary: Mapping[str, Any], section: str) -> object:
    return ((summary.get(section) or {}).get("diagnosis") or {}).get("kind")
