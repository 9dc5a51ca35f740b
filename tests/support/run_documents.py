"""Documents of schema ``torchperfd.run/1`` as ``torchperfd run`` keeps them."""

from collections.abc import Mapping
from typing import Any

from torchperfd.runs.record import RunRecord


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


def _times(calls: int, seconds: float) -> dict[str, Any]:
    return {"calls": calls, "seconds_total": calls * seconds, "mean_seconds": seconds, "std_seconds": 0.0}
