"""Figures of a verdict change when the run has changed, and not with each window."""

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from torchperfd_daemon.diagnosis import Cause, Verdict
from torchperfd_daemon.diagnosis.evidence import WINDOW_SAMPLES
from torchperfd_daemon.observer.verdict_debouncer import HeldFigures


def windows(seconds: int, cost: float, step: float, noise: float, seed: int = 0) -> Iterator[Verdict]:
    """Yield the verdict of each second's window."""
    random = np.random.default_rng(seed)
    newest: deque[tuple[float, float]] = deque(maxlen=WINDOW_SAMPLES)
    for second in range(seconds):
        own = cost * random.lognormal(0, noise)
        newest.append((own, own + (step - cost) * random.lognormal(0, noise)))
        if second < 2:
            continue
        spent, whole = (float(each) for each in np.mean(newest, axis=0))
        evidence = f"waits {spent * 1e3:.1f} ms of each {whole * 1e3:.1f} ms"
        found = Verdict(Cause.INPUT_BOUND, "r", "n", 0, "data", evidence, spent, "", window_seconds=10.0)
        yield replace(found, step_seconds=whole, fix="DataLoader(num_workers=4)", saves_seconds=0.9 * spent)


def figures(verdict: Verdict) -> tuple[float, float, float]:
    return verdict.cost_seconds_per_step, verdict.step_seconds, verdict.saves_seconds


@pytest.mark.parametrize("noise", [0.02, 0.1, 0.3])
def test_steady_loop_changes_its_cost_at_most_once(noise: float) -> None:
    """In ten minutes, after the first whole window; its evidence stays that of the same figures."""
    changes = []
    for seed in range(10):
        found = [*windows(600, 0.064, 0.085, noise, seed)]
        held = HeldFigures(found[0])
        shown = []
        for verdict in found:
            held.update(verdict)
            shown.append(held.verdict)
        settled = shown[2 * WINDOW_SAMPLES :]
        changes.append(sum(figures(a) != figures(b) for a, b in pairwise(settled)))
        for each in settled:
            spent = f"waits {each.cost_seconds_per_step * 1e3:.1f} ms"
            assert each.evidence.startswith(spent)
    assert np.mean(changes) <= 2, changes


@pytest.mark.parametrize(("cost", "step"), [(0.128, 0.149), (0.02, 0.041), (0.064, 0.2)])
def test_change_of_the_run_is_followed_within_a_window(cost: float, step: float) -> None:
    found = [*windows(100, 0.064, 0.085, 0.1)]
    held = HeldFigures(found[0])
    for verdict in found:
        held.update(verdict)
    changed = [*windows(30, cost, step, 0.1, seed=1)]
    for verdict in changed[: WINDOW_SAMPLES + 2]:
        held.update(verdict)
    assert held.verdict.cost_seconds_per_step == pytest.approx(cost, rel=0.15)
    assert held.verdict.step_seconds == pytest.approx(step, rel=0.15)


def test_other_words_are_shown_at_once() -> None:
    first = next(windows(3, 0.064, 0.085, 0.0))
    held = HeldFigures(first)
    held.update(first)
    other = replace(first, fix="DataLoader(num_workers=6)", evidence=f"{first.evidence}; now more")
    held.update(other)
    assert (held.verdict.fix, held.verdict.evidence) == (other.fix, other.evidence)


def test_saving_stays_within_the_held_cost() -> None:
    first = next(windows(3, 0.064, 0.085, 0.0))
    held = HeldFigures(first)
    held.update(first)
    held.update(replace(first, fix="another", saves_seconds=0.0645, cost_seconds_per_step=0.0645))
    assert held.verdict.saves_seconds <= held.verdict.cost_seconds_per_step
