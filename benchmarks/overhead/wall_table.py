"""The table of wall times: by how much steps of 1, 10 and 100 ms get longer."""

import itertools
import math
import statistics
from functools import partial

from benchmarks.overhead.contest import NO_PROFILER, OURS, Contest
from benchmarks.overhead.wall import STEP_LENGTHS, measure_wall
from benchmarks.overhead.worker import Round


def compare_walls(rounds: int, *, replicated: bool) -> list[str]:
    """Measure and print how the wall times of steps change; return the failed checks."""
    print(f"{'':<8} {'':<16} {'step':>9} {'mean':>8} {'± s.e.':>8} {'limit':>7} {'p50':>8} {'p99':>8}")
    complaints = []
    for length in STEP_LENGTHS:
        work = partial(measure_wall, length=length)
        contest = Contest(
            (NO_PROFILER, OURS),
            rounds,
            work,
            steps=length.pass_steps,
            width=length.width,
            replicated=replicated,
        )
        contest.run()
        for name, measured in contest.measured.items():
            if name in contest.failures:
                complaints.append(f"{length.name}: {name} was not measured: {contest.failures[name]}")
                continue
            mean = _mean_change(measured)
            error = _jackknife([_mean_change(measured[:n] + measured[n + 1 :]) for n in range(len(measured))])
            usual = (
                statistics.median(itertools.chain.from_iterable(one.off.wall_ns for one in measured)) / 1e6
            )
            row = f"{length.name:<8} {name:<16} {usual:>6.2f} ms {mean:>+8.2%} {error:>8.2%}"
            row += (
                f" {length.limit:>7.1%} {wall_change(measured, 50):>+8.2%} {wall_change(measured, 99):>+8.2%}"
            )
            print(row, flush=True)
            if name == OURS and mean > length.limit:
                complaints.append(
                    f"the mean step of {length.name} changes by {mean:+.2%}, limit {length.limit:.1%}"
                )
    return complaints


def wall_change(rounds: list[Round], percentile: int) -> float:
    """Return by which part a percentile of the wall times of all steps is longer when on."""
    before, after = (
        statistics.quantiles(itertools.chain.from_iterable(steps), n=100)[percentile - 1]
        for steps in ((one.off.relative for one in rounds), (one.on.relative for one in rounds))
    )
    return after / before - 1


def _mean_change(rounds: list[Round]) -> float:
    """Return by which part the mean step is longer when on."""
    before, after = (
        statistics.fmean(itertools.chain.from_iterable(steps))
        for steps in ((one.off.relative for one in rounds), (one.on.relative for one in rounds))
    )
    return after / before - 1


def _jackknife(values: list[float]) -> float:
    """Return the standard error of an estimate, of its values with one round left out each."""
    return math.sqrt((len(values) - 1) * statistics.pvariance(values))
