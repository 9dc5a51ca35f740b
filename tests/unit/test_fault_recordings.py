"""Recordings of the fault suite's jobs are read as they were written, also while the evidence grows."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.faults import catalog, recordings, replay
from benchmarks.faults.catalog import FAULTS
from benchmarks.faults.journal import Measured
from benchmarks.faults.recordings import compact_line, rebuild
from benchmarks.faults.trial import Answer, Trial

from torchperfd.model.loader_facts import UNMEASURED_COST, LoaderFacts
from torchperfd.model.source_lines import InputStages
from torchperfd_daemon.diagnosis.edits import Pauses
from torchperfd_daemon.diagnosis.evidence import RankEvidence
from torchperfd_daemon.store.model import HISTORY_STEPS

EVIDENCE = RankEvidence(
    rank=0,
    node="n",
    step_seconds=0.1,
    phase_seconds={"data": 0.06, "forward": 0.04},
    loader=LoaderFacts(workers=2, stages=InputStages(workers=2, samples=7)),
    before=RankEvidence(rank=0, node="n", step_seconds=0.04, phase_seconds={"forward": 0.04}),
    window_seconds=8.0,
)


def sample_line(unix: float, next_step: int, made: int, **more: Any) -> str:
    rank = {
        "evidence": EVIDENCE,
        "fills_window": True,
        "p95_seconds": 0.11,
        "window_steps": 30,
        "next_step": next_step,
        "duration_ns": [10**8] * made,
        "phase_ns": {"data": [6 * 10**7] * made, "forward": [4 * 10**7] * made},
        "device_phase_seconds": {},
        "collections": [Pauses(0.5, 0.001)],
    }
    sample = {
        "unix": unix,
        "now": unix - 1000,
        "since": -np.inf,
        "slowdown": None,
        "period": 1,
        "past_step_seconds": None,
        "cost": UNMEASURED_COST,
        "ranks": [rank],
        "found": [("input-bound", None, 0.06)],
        "published": [],
    }
    return compact_line({**sample, **more})


def recorded(tmp_path: Path, *lines: str) -> recordings.Recording:
    plan = replace(catalog.plan(FAULTS[0], "mlp-ddp", 1), ranks=1)
    trial = Trial(plan, Measured(0.04, 0.1, 0.06, 0.06), (Answer(9.0, "none", None, 0.0, ""),))
    file = tmp_path / "samples.jsonl"
    file.write_text("".join(lines))
    return recordings.read(recordings.write(tmp_path / "kept", trial, 2000.0, (1.5, 2.5), file))


def test_recording_is_read_as_it_was_written(tmp_path: Path) -> None:
    own = recorded(tmp_path, sample_line(1999.0, 40, 40), sample_line(2001.0, 60, 20), '{"unix": 20')
    assert (own.onset_unix, own.load, own.trial.measured.injected) == (2000.0, (1.5, 2.5), 0.06)
    assert [sample.unix for sample in own.samples] == [1999.0, 2001.0]
    (sample,) = own.with_fault
    (rank,) = sample.ranks
    assert rank.evidence == EVIDENCE
    assert sample.cost == UNMEASURED_COST
    assert sample.since == -np.inf
    assert rank.collections == (Pauses(0.5, 0.001),)
    assert (rank.first_step, rank.next_step, len(rank.duration_seconds)) == (0, 60, 60)
    assert rank.window_work.phase_seconds["data"] == pytest.approx([0.06] * 30)
    assert {len(column) for column in rank.work(10, 35).phase_seconds.values()} == {25}


def test_recording_holds_as_many_steps_as_the_daemon(tmp_path: Path) -> None:
    own = recorded(tmp_path, *(sample_line(2000.0 + part, 100 * part, 100) for part in range(1, 5)))
    (rank,) = own.samples[-1].ranks
    assert len(rank.duration_seconds) == HISTORY_STEPS
    assert rank.first_step == 400 - HISTORY_STEPS


def test_samples_after_the_last_answer_are_left_out(tmp_path: Path) -> None:
    own = recorded(tmp_path, sample_line(2008.0, 40, 40), sample_line(2010.0, 60, 20))
    assert [sample.unix for sample in own.with_fault] == [2008.0]


def test_rebuild_takes_defaults_and_drops_old_fields() -> None:
    assert rebuild(Pauses, {"per_step": 1.0, "seconds": 2.0, "of_yore": 3}) == Pauses(1.0, 2.0)
    evidence = rebuild(RankEvidence, {"rank": 1, "node": "n", "step_seconds": 0.1, "of_yore": 3})
    assert evidence == RankEvidence(1, "n", 0.1)
    assert rebuild(dict[int, tuple[float, ...]], {"3": [1.0, 2.0]}) == {3: (1.0, 2.0)}


def test_replay_judges_a_recording_without_its_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [sample_line(2001.0 + place, 40 + 10 * place, 10) for place in range(6)]
    recorded(tmp_path, sample_line(1999.0, 40, 40), *lines)
    (trial,) = replay.trials(tmp_path / "kept", ["healthy"])
    assert trial.answers[-1].cause == "input-bound"
    assert trial.answers[-1].cost == pytest.approx(0.06)
    assert "input-bound (wrong)" in capsys.readouterr().out
    assert replay.trials(tmp_path / "kept", ["hog"]) == []
