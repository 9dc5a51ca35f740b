"""The fault suite's jobs really train, have their fault, and are gone afterwards."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest
from benchmarks.faults import catalog, recordings
from benchmarks.faults.trial import JOB, run

pytestmark = pytest.mark.slow

NAMED = {fault.name: fault for fault in catalog.FAULTS}


@pytest.mark.serial
@pytest.mark.parametrize(
    ("fault", "model"), [("slow loader, one rank", "convnet-fsdp2"), ("slow collective", "mlp-ddp")]
)
def test_a_slow_job(fault: str, model: str, tmp_path: Path) -> None:
    plan = replace(catalog.plan(NAMED[fault], model, 1, ranks=2), onset=45)
    trial = run(plan, 5.0, heal=True, keep=partial(recordings.write, tmp_path))
    assert trial.failure == ""
    assert trial.measured.injected >= plan.seconds
    assert trial.measured.before > plan.pace_seconds
    assert trial.measured.healed is not None
    assert plan.pace_seconds < trial.measured.healed < trial.measured.after
    assert trial.answers[0].after_onset < 0 < trial.answers[-1].after_onset
    (recording,) = recordings.read_all(tmp_path)
    assert recording.trial == trial
    assert {len(sample.ranks) for sample in recording.with_fault} == {2}
    assert recording.with_fault[-1].ranks[0].next_step > plan.onset
    assert not [each for each in psutil.process_iter(["cmdline"]) if str(JOB) in (each.info["cmdline"] or [])]


def test_rank_that_skips_a_collective_is_set_apart_at_its_line() -> None:
    plan = replace(catalog.plan(NAMED["skipped collective"], "mlp-ddp", 1, ranks=3), onset=5)
    trial = run(plan, 3.0, heal=False)
    assert trial.failure == ""
    assert trial.standstill is not None
    assert trial.standstill.odd == plan.culprits
    assert trial.standstill.lines == (plan.hang_line,)
