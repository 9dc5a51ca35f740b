"""Run the contest and judge it.

    make bench-overhead
    python -m benchmarks.overhead --ddp
    python -m benchmarks.overhead --quick

Prints one row per contestant: the CPU time of the training thread that it adds to a step
(median and deciles over rounds), how many times ours that is, and by how much the median
of the steps' wall times changes. The first row, without a profiler, is the noise of the measurement.
Then by how much the wall time of settled steps of 1, 10 and 100 ms changes (``settled.py``).
Exits 1 when torchperfd adds more than 8 µs, or lengthens a settled step beyond its limit, or is not
15 times cheaper than TraceML, or not 2.5 times cheaper than Lightning's SimpleProfiler.
With --ddp the loop is that of a rank of DistributedDataParallel, on gloo: then torchperfd
times its collectives as well, within the same limits; settled steps are those of two ranks.
"""

import argparse
import itertools
import platform
import statistics
import sys
from collections.abc import Mapping
from functools import partial
from typing import Final

import torch
from benchmarks.judge import exit_code, missed
from benchmarks.overhead.contest import NO_PROFILER, OURS, Contest, shares
from benchmarks.overhead.contestants import CONTESTANTS
from benchmarks.overhead.settled import compare_settled
from benchmarks.overhead.worker import Round, measure

LIMIT_US: Final = 8.0
TIMES_CHEAPER: Final = {"TraceML": 15.0, "Lightning SimpleProfiler": 2.5}


def print_table(measured: Mapping[str, list[Round]], failures: Mapping[str, str]) -> None:
    ours = _added_us(measured[OURS])
    print(
        f"{'':<26} {'added CPU per step':>18} {'p10':>7} {'p90':>7} {'x ours':>7} {'mean':>9} {'wall p50':>9}"
    )
    for name, rounds in measured.items():
        if name in failures or not rounds:
            print(f"{name:<26} not measured: {failures.get(name, 'no round')}")
            continue
        added = _added_us(rounds)
        deciles = statistics.quantiles((one.added_ns / 1e3 for one in rounds), n=10)
        mean = statistics.median(one.added_mean_ns for one in rounds) / 1e3
        ratio = f"{added / ours:.1f}" if ours > 0 and name != NO_PROFILER else ""
        print(
            f"{name:<26} {added:>+15.1f} µs {deciles[0]:>+7.1f} {deciles[8]:>+7.1f} {ratio:>7} "
            f"{mean:>+6.0f} µs {_wall_change(rounds):>+8.1%}"
        )


def judge(measured: Mapping[str, list[Round]], failures: Mapping[str, str]) -> list[str]:
    """Return the failed checks; print what cannot be judged."""
    if OURS in failures:
        return [f"torchperfd was not measured: {failures[OURS]}"]
    ours = _added_us(measured[OURS])
    complaints = []
    if ours > LIMIT_US:
        complaints.append(f"torchperfd adds {ours:.1f} µs to a step, limit {LIMIT_US:.0f} µs")
    for name, times in TIMES_CHEAPER.items():
        theirs = _added_us(measured[name])
        if name in failures:
            print(f"not judged: how much cheaper torchperfd is than {name}")
        elif theirs < times * ours:
            ratio = theirs / ours
            complaints.append(f"torchperfd is {ratio:.1f} times cheaper than {name}, wanted {times:g}")
    return complaints


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=30, help="times that everybody attaches and detaches")
    parser.add_argument("--alternations", type=int, default=8, help="off-on-on-off per round")
    parser.add_argument("--steps", type=int, default=20, help="steps per block; an alternation has four")
    parser.add_argument(
        "--ddp", action="store_true", help="in a rank of DistributedDataParallel: collectives, too"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a smoke run: nothing installed, no limit judged"
    )
    options = parser.parse_args()
    rounds = 2 if options.quick else max(2, options.rounds)
    work = partial(measure, alternations=options.alternations)
    contest = Contest(CONTESTANTS, rounds, work, steps=options.steps, replicated=options.ddp)
    contest.look_for(may_install=not options.quick)
    contest.run()
    print_table(contest.measured, contest.failures)
    _print_foot(contest, rounds, f"{options.alternations} x (off, on, on, off) x {options.steps} steps")
    if options.quick:
        return 1 if OURS in contest.failures else 0
    print()
    settled = compare_settled(2 if options.ddp else 1)
    return exit_code([*judge(contest.measured, contest.failures), *missed(settled)])


def _print_foot(contest: Contest, rounds: int, turns: str) -> None:
    bare = statistics.median(one.off.quiet_ns for every in contest.measured.values() for one in every) / 1e3
    print(
        f"\nadded CPU: of the training thread, to an undisturbed step (bare: {bare:.0f} µs); median and"
        f"\ndeciles of {rounds} rounds of attach, {turns}, detach, in {len(shares(rounds))}"
        "\nprocesses; mean: to any step."
        "\nSimpleProfiler: profile() around the same seven actions, without a Trainer, which times more;"
        "\ncallbacks: our own few lines in the manner of fastai and fastxtend."
    )
    versions = [version for version in contest.versions if version]
    print(", ".join([f"Python {platform.python_version()}", f"torch {torch.__version__}", *versions]))


def _wall_change(rounds: list[Round]) -> float:
    """Return by which part the median of the wall times of all steps is longer when on."""
    before, after = (
        statistics.median(itertools.chain.from_iterable(steps))
        for steps in ((one.off.relative for one in rounds), (one.on.relative for one in rounds))
    )
    return after / before - 1


def _added_us(rounds: list[Round]) -> float:
    return statistics.median(one.added_ns for one in rounds) / 1e3 if rounds else 0.0


if __name__ == "__main__":
    sys.exit(main())
