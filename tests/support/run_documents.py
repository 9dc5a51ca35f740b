"""Documents of schema ``torchperfd.run/1`` as ``torchperfd run`` keeps them."""

from collections.abc import Mapping
from typing import Any, Final

import pytest

from torchperfd.report.record import RunRecord

PREDICTED: Final[dict[str, Any]] = {
    "cause": "input-bound",
    "summary": "the input takes 64 % of the step",
    "evidence": "55 ms of each 85.6 ms step waiting for data",
    "cost_seconds_per_step": 0.055,
    "step_seconds": 0.0856,
    "saves_seconds": 0.0394,
    "fix": "DataLoader(..., num_workers=4, persistent_workers=True)",
}
"""A verdict that promises 46 % of the step."""


def run_file(run: str, *, steps: int, seconds: Mapping[str, float], rank: int = 0) -> dict[str, Any]:
    """Return the report of a run without noise: each phase takes the same seconds in every step."""
    phases = {name: _times(steps, each) for name, each in seconds.items()}
    first = {name: _times(1, each) for name, each in seconds.items()}
    step = sum(seconds.values())
    return {
        "schema": "torchperfd.run/1",
        "run": run,
        "ranks": [
            {
                "rank": rank,
                "train": {"steps": steps, "step_seconds_total": steps * step, "phases": phases},
                "warmup": {"steps": 1, "step_seconds_total": step, "phases": first},
                "blocks": {
                    "steps": 1,
                    "step_seconds": [step] * (steps - 1),
                    "phases": {name: [each] * (steps - 1) for name, each in seconds.items()},
                },
            }
        ],
        "verdict": {"cause": "input_bound", "summary": "the input takes 25 % of the step"},
        "script": "train.py",
        "job": "train",
        "host": "node-1",
        "world_size": 1,
        "started_seconds": 1_790_000_000.0,
        "ended_seconds": 1_790_000_060.0,
        "exit": {"state": "finished", "code": 0},
        "versions": {"torchperfd": "0.1.0", "python": "3.11.7", "torch": "2.13.0"},
        "environment": {"cpus": 8, "threads": 4},
    }


def document_of(record: RunRecord) -> dict[str, Any]:
    """Return the report of a run whose blocks are known."""
    (rank,) = record.ranks
    assert rank.blocks is not None
    means = {name: sum(column) / len(column) for name, column in rank.blocks.phases.items()}
    document = run_file(record.run, steps=rank.steps, seconds=means)
    document["ranks"][0]["blocks"] = {
        "steps": rank.blocks.steps,
        "step_seconds": rank.blocks.step,
        "phases": rank.blocks.phases,
    }
    return document


def kept_run(
    seconds: Mapping[str, float],
    *,
    run: str,
    steps: int = 200,
    verdict: dict[str, Any] | None = None,
    batch: int = 32,
    code: str = "c0de",
    workers: int = 0,
    **more: Any,
) -> dict[str, Any]:
    """Return the report of a run with what it has executed, its settings and its samples.

    Args:
        seconds: Each phase's, in every step.
        verdict: By default a healthy one.
        batch: Samples in each step.
        code: Digest of the script.
        more: Replaces what the report has.
    """
    document = run_file(run, steps=steps, seconds=seconds)
    rank = document["ranks"][0]
    rank["train"]["samples"], rank["warmup"]["samples"] = batch * steps, batch
    document["verdict"] = verdict or {"cause": "none", "summary": "healthy"}
    document["source"] = {"path": "abcd", "code": code, "arguments": "12"}
    document["settings"] = {"num_workers": workers, "batch_size": batch}
    return document | more


def _times(calls: int, seconds: float) -> dict[str, Any]:
    return {"calls": calls, "seconds_total": calls * seconds, "mean_seconds": seconds, "std_seconds": 0.0}


def differing(document: Any, other: Any) -> set[str]:
    """Return the paths of the values by which two documents differ; numbers may by a millionth."""
    ours, theirs = _values(document), _values(other)
    shared = ours.keys() & theirs.keys()
    return (ours.keys() ^ theirs.keys()) | {
        path for path in shared if ours[path] != pytest.approx(theirs[path])
    }


def _values(document: Any, path: str = "") -> dict[str, Any]:
    parts = enumerate(document) if isinstance(document, list) else document.items()
    found: dict[str, Any] = {}
    for key, value in parts:
        name = f"{path}/{key}"
        found |= _values(value, name) if isinstance(value, (dict, list)) else {name: value}
    return found
