"""Randomised trials: check that torchperfd never changes what a script does, even when it fails.

    make bench-trials
    python -m benchmarks.trials --count 500 --seed 7

Each trial draws what the script does, what becomes of the daemon, how the script is run and which half of
the hooks it uses. It is compared with the same script without torchperfd: exit code, all losses, steps, what
is written to stderr, exceptions raised and seen, and the time from the end of the loop to the end of the last
exit handler. Prints a table and every discrepancy; exits 1 where there is one.
"""

import argparse
import random
import sys
import time
from collections import Counter
from typing import Final

from benchmarks.trials.faults import FAULTS
from benchmarks.trials.script_names import BEHAVIOURS
from benchmarks.trials.trial import Outcome, Trial, compare, run, run_bare

SEEDS: Final = 3
"""Scripts are run with so many seeds: those without torchperfd are run once each."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trials", description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=60, help="trials")
    parser.add_argument("--seed", type=int, default=1, help="another one draws other trials")
    parser.add_argument("--behaviour", choices=sorted(BEHAVIOURS), help="only this one of the script's")
    parser.add_argument("--fault", choices=sorted(FAULTS), help="only this one of the daemon's")
    arguments = parser.parse_args()
    chance = random.Random(arguments.seed)
    bare: dict[tuple[str, int], Outcome] = {}
    found: list[tuple[Trial, list[str]]] = []
    made: Counter[str] = Counter()
    began = time.monotonic()
    for number in range(1, arguments.count + 1):
        trial = Trial(
            behaviour=arguments.behaviour or chance.choice(sorted(BEHAVIOURS)),
            fault=arguments.fault or chance.choice(sorted(FAULTS)),
            is_run=chance.random() < 0.4,
            is_portable=chance.random() < 0.4,
            seed=chance.randrange(SEEDS),
        )
        key = trial.behaviour, trial.seed
        if key not in bare:
            bare[key] = run_bare(trial)
        outcome = run(trial)
        discrepancies = compare(trial, bare[key], outcome)
        made.update((trial.behaviour, trial.fault))
        if discrepancies:
            found.append((trial, discrepancies))
            print(f"{number}: {trial}", *discrepancies, sep="\n    ", flush=True)
        if number % 20 == 0:
            print(f"{number} trials, {len(found)} with a discrepancy", flush=True)
    _print_table(made, found)
    print(f"{arguments.count} trials in {time.monotonic() - began:.0f} s, {len(found)} with a discrepancy")
    return 1 if found else 0


def _print_table(made: Counter[str], found: list[tuple[Trial, list[str]]]) -> None:
    failed = Counter(name for trial, _ in found for name in (trial.behaviour, trial.fault))
    print(f"{'what':24}{'trials':>8}{'discrepancies':>15}")
    for name in (*sorted(BEHAVIOURS), *sorted(FAULTS)):
        if made[name]:
            print(f"{name:24}{made[name]:8}{failed[name]:15}")


if __name__ == "__main__":
    sys.exit(main())
