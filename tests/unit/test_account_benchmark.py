"""The check of the model against an oracle: it reads jobs, costs their faults, and finds them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.account.__main__ import Score
from benchmarks.account.jobs import read

STEPS = 120


def job(late_ms: float, uneven_ms: float = 0.0, collected_ms: float = 0.0) -> dict[str, Any]:
    """Return a job of four ranks that meet on the host, of which rank 2 is late, as the oracle writes it."""
    chance = np.random.default_rng(3)
    forward = np.full((4, STEPS), 10.0) * (1 + 0.01 * chance.standard_normal((4, STEPS)))
    clean = forward.copy()
    forward[2] += late_ms
    forward += uneven_ms * chance.random((4, STEPS))
    gc = np.zeros((4, STEPS))
    gc[1, ::4] = collected_ms
    backward = np.full((4, STEPS), 20.0) * (1 + 0.01 * chance.standard_normal((4, STEPS)))
    own = forward + backward + gc
    together = own.max(axis=0) + 1.0

    def step(rank: int, number: int) -> dict[str, Any]:
        host = {
            "data": 0.0,
            "forward": forward[rank, number],
            "backward": backward[rank, number] + gc[rank, number],
            "collective_wait": together[number] - own[rank, number],
            "optimizer": 2.0,
            "other": 1.0,
        }
        collected = gc[rank, number]
        return {"host": host, "device": None, "gc": collected, "queued": 0.0, "sync_wait": 0.0}

    mean = float(together.mean()) + 3.0
    truth = []
    if late_ms:
        without = forward + backward + gc
        without[2] = clean[2] + backward[2] + gc[2]
        cost = float((together - without.max(axis=0) - 1.0).mean())
        truth.append(
            {"kind": "slow_host", "rank": 2, "phase": "forward", "injected": late_ms, "cost_ms": cost}
        )
    if collected_ms:
        cost = float((together - (own - gc).max(axis=0) - 1.0).mean())
        injected = collected_ms / 4
        truth.append({"kind": "gc", "rank": 1, "phase": "backward", "injected": injected, "cost_ms": cost})
    described = {"seed": 1, "ranks": 4, "workers": 0, "make_ms": 0.0}
    records = [[step(rank, number) for number in range(STEPS)] for rank in range(4)]
    return {"job": described, "records": records, "step_ms": mean, "truth": truth}


def scored(tmp_path: Path, *jobs: dict[str, Any]) -> Score:
    file = tmp_path / "jobs.jsonl"
    file.write_text("".join(f"{json.dumps(each)}\n" for each in jobs))
    score = Score()
    for each in read(file):
        score.add(each)
    return score


def test_score_of_a_late_rank_has_its_cost_and_name(tmp_path: Path) -> None:
    score = scored(tmp_path, job(5.0), job(0.0))
    assert score.costs == {("slow_host", True): 1}
    assert score.named == {("slow_host", True): 1}
    assert score.clean == {True: 1}
    assert score.wrong == []


def test_score_of_rare_collections_has_their_cost(tmp_path: Path) -> None:
    score = scored(tmp_path, job(0.0, collected_ms=16.0))
    assert score.costs == {("gc", True): 1}
    assert score.named == {("gc", True): 1}


def test_score_notes_a_wrong_cost(tmp_path: Path) -> None:
    wrong = job(5.0)
    wrong["truth"][0]["cost_ms"] = 20.0
    score = scored(tmp_path, wrong)
    assert score.costs == {("slow_host", False): 1}
    assert "costs 20.00 ms, model" in score.wrong[0]
    assert not score.report()
