"""Judges recorded jobs again, in seconds: to see what a change of the diagnosis does to all of them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
from benchmarks.faults import recordings, report
from benchmarks.faults.recordings import Recording, Sample
from benchmarks.faults.trial import Answer, Prediction, Trial

from torchperfd_daemon.diagnosis.claims import limit_claim
from torchperfd_daemon.diagnosis.evidence import MIN_WINDOW_SAMPLES, WARM_STEPS, do_devices_wait, hide_waits
from torchperfd_daemon.diagnosis.predictions import predict as predict_steps
from torchperfd_daemon.diagnosis.remedies import RuleCounsel
from torchperfd_daemon.diagnosis.verdict import Cause, Verdict
from torchperfd_daemon.diagnosis.verdicts import rank_causes
from torchperfd_daemon.observer.verdict_debouncer import VerdictDebouncer

_RUN: Final = "faults"
_MIN_STEPS: Final = 20


def find_causes(sample: Sample) -> list[Verdict]:
    """Return the verdicts of the present diagnosis on a sample; empty where it is too early for any."""
    evidence = sample.evidence
    works = {rank.evidence.rank: rank.window_work for rank in sample.ranks}
    first, *others = rank_causes(_RUN, evidence, RuleCounsel(lambda: sample.cost), works)
    unseen = max(each.world_size for each in evidence) - len(evidence)
    slowest = max(sample.ranks, key=lambda rank: rank.evidence.step_seconds)
    first = limit_claim(first, evidence, unseen, newest=np.full(20, slowest.p95_seconds))
    if first.cause is Cause.NONE and not any(rank.fills_window for rank in sample.ranks):
        return []
    onset = sample.slowdown.step if sample.slowdown else None
    step = slowest.evidence.step_seconds
    return [replace(each, onset_step=onset, step_seconds=step) for each in (first, *others)]


def predict(sample: Sample) -> list[Prediction]:
    """Return what the present diagnosis says that steps would take without each cause."""
    ranks, evidence = sample.ranks, sample.evidence
    pauses = {rank.evidence.rank: rank.collections for rank in ranks}
    on_device = do_devices_wait(evidence)
    end = min(rank.next_step for rank in ranks)
    held = min(end - rank.first_step for rank in ranks)
    since = max(end - held, sample.slowdown.step if sample.slowdown else 0)
    first = max(end - held, WARM_STEPS)
    answers = None
    if end - since >= _MIN_STEPS:
        past = [rank.work(first, since) for rank in ranks] if since - first >= _MIN_STEPS else []
        now = [rank.work(since, end) for rank in ranks]
        answers = predict_steps(now, pauses, past, hidden=on_device or hide_waits(evidence))
    if on_device:
        count = min(rank.device_samples for rank in ranks)
        if count >= MIN_WINDOW_SAMPLES:
            newest = predict_steps([rank.device_work(count) for rank in ranks], pauses)
            newest = newest.as_judged(find_causes(sample))
            answers = newest.with_growth_of(answers) if answers else newest
    return [
        Prediction(each.removed.value, each.rank, each.phase, each.step_seconds)
        for each in (answers.answers if answers else ())
    ]


def judged(recording: Recording) -> Trial:
    """Return a recorded job with the answers of the present diagnosis in place of those of its daemon.

    A hang is not judged by samples: no step ends in it, and so its answers stay.
    """
    trial = recording.trial
    samples = recording.with_fault
    if trial.standstill is not None or not samples:
        return trial
    debouncer, answers = VerdictDebouncer(), []
    for sample in recording.until_end:
        debouncer.update(find_causes(sample))
        answers.append(_answer(debouncer.first, sample.unix - recording.onset_unix))
    return replace(trial, answers=tuple(answers), predictions=tuple(predict(samples[-1])))


def _answer(verdict: Verdict | None, after_onset: float) -> Answer:
    if verdict is None:
        return Answer(after_onset, Cause.UNKNOWN.value, None, 0.0, "")
    return Answer(
        after_onset, verdict.cause.value, verdict.rank, verdict.cost_seconds_per_step, verdict.evidence
    )


def trials(directory: Path, only: Sequence[str]) -> list[Trial]:
    """Judge all recordings in a directory, printing a line for each, with the machine's load at the time.

    Args:
        directory: Where they are.
        only: Parts of the names of the faults that are wanted; empty: all.
    """
    made = []
    print(f"\n{report.head()}")
    for recording in recordings.read_all(directory):
        if not only or any(part in recording.trial.plan.fault for part in only):
            made.append(judged(recording))
            before, after = recording.load
            print(f"{report.line(made[-1])}  (load {before:.0f} to {after:.0f})")
    return made
