"""Count how often a comparison of two runs is right.

    python -m benchmarks.run_comparison [--pairs 200] [--steps 200 1000 3000] [--real N]

Simulated pairs have a known truth: two equal runs, runs with 5 % of a step planted in one phase (each phase
in turn), and runs on a machine that is 8 % slower. ``--real N`` compares N pairs of real runs of one small
script instead, which follow each other on this machine. Exits 1 if equal runs show a change in more than 5 of
100 pairs, or if a planted phase is not found, or another one is named, in more than 5 of 100.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Final

from benchmarks.judge import exit_code
from benchmarks.run_comparison.simulation import PHASES, simulate

from torchperfd.report.comparison import RunComparison, compare_runs
from torchperfd.report.previous_runs import findings, headline
from torchperfd.report.record import RunRecord
from torchperfd.report.store import read_file

_PLANTED: Final = 0.05
_SLOWER_MACHINE: Final = 1.08
_BOUND: Final = 0.95


def main() -> int:
    """Print a table; return 1 where a bound does not hold."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--steps", type=int, nargs="+", default=[200, 1000, 3000])
    parser.add_argument("--real", type=int, metavar="N", default=0)
    parser.add_argument("--repeats", type=int, default=1, help="Multiplications planted in the real forward.")
    options = parser.parse_args()
    if options.real:
        return _real_pairs(options.real, options.repeats)
    complaints = [
        f"{steps} steps: {complaint}"
        for steps in options.steps
        for complaint in _simulated_pairs(steps, options.pairs)
    ]
    return exit_code(complaints)


def _simulated_pairs(steps: int, pairs: int) -> list[str]:
    source = random.Random(steps)
    counts: Counter[str] = Counter()
    margins = 0.0
    for number in range(pairs):
        planted = list(PHASES)[number % len(PHASES)]
        before = simulate(source, steps=steps)
        equal = compare_runs(before, simulate(source, steps=steps))
        counts["equal"] += _is_silent(equal)
        margins += equal.ratio_margin
        found = compare_runs(before, simulate(source, steps=steps, planted={planted: _PLANTED}))
        counts["named"] += planted in _named(found)
        counts["alone"] += _named(found) == [planted] and found.machine_factor is None
        counts["step"] += found.is_step_changed
        slower = compare_runs(before, simulate(source, steps=steps, speed=_SLOWER_MACHINE))
        counts["machine"] += slower.machine_factor is not None
        counts["blamed"] += bool(_named(slower))
    print(
        f"{steps} steps, {pairs} pairs each: equal runs without a change {counts['equal']}; "
        f"planted phase named {counts['named']}, it alone {counts['alone']}, "
        f"step time changed {counts['step']}; "
        f"slower machine found {counts['machine']}, a phase named for it {counts['blamed']}; "
        f"mean ± of the step {margins / pairs:.1%}",
        flush=True,
    )
    complaints = []
    if counts["equal"] < _BOUND * pairs:
        complaints.append(f"equal runs show a change in {pairs - counts['equal']} of {pairs} pairs")
    if counts["alone"] < _BOUND * pairs:
        complaints.append(f"the planted phase alone is named in {counts['alone']} of {pairs} pairs")
    return complaints


def _real_pairs(pairs: int, repeats: int) -> int:
    """Compare real runs that follow each other: the first and the second are equal, the third is slower."""
    counts: Counter[str] = Counter()
    for number in range(pairs):
        one, two = _run(0), _run(0)
        planted = _run(repeats)
        equal, found = compare_runs(one, two), compare_runs(two, planted)
        counts["equal"] += _is_silent(equal)
        counts["equal_phases"] += not _named(equal)
        counts["named"] += "forward" in _named(found)
        counts["alone"] += _named(found) == ["forward"]
        share = next((phase.share for phase in found.phases if phase.name == "forward"), 0.0)
        print(f"{number + 1}: equal    {headline(equal)} {findings(equal)}")
        print(
            f"{number + 1}: planted  {headline(found)} {findings(found)} (forward {share:+.1%})", flush=True
        )
    print(
        f"{pairs} pairs: equal runs without a change {counts['equal']}, "
        f"without a phase {counts['equal_phases']}; "
        f"planted forward named {counts['named']}, it alone {counts['alone']}"
    )
    return 0 if min(counts["equal"], counts["alone"]) >= _BOUND * pairs else 1


def _run(repeats: int) -> RunRecord:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [sys.executable, "-m", "torchperfd", "run", "--no-daemon", "--no-keep", "--quiet"]
        script = ["--report", str(report), str(Path(__file__).with_name("script.py"))]
        subprocess.run([*command, *script, "--slow-forward", str(repeats)], check=True)
        assert json.loads(report.read_text())["exit"]["code"] == 0
        return read_file(str(report))


def _is_silent(comparison: RunComparison) -> bool:
    return not comparison.is_changed and not _named(comparison)


def _named(comparison: RunComparison) -> list[str]:
    return [phase.name for phase in comparison.changed_phases]


if __name__ == "__main__":
    sys.exit(main())
