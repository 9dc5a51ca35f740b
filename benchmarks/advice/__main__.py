"""Whether each rule that a CPU can show is right about a real training loop.

    python -m benchmarks.advice [--seconds S] [RULE ...]

For each rule a slow loop, and one with the advice taken, run by turns in processes of their own. Now and then
the slow one is recorded and analysed: the rule's advice must come first. The difference of unprofiled steps
must be what was predicted within a quarter, medians of both, and of the tuned loop's recording the rule must
be silent. About a well-tuned loop nothing may be said. Exits 1 when any of this is not so.
"""

import argparse
import statistics
import sys
from typing import Final

from benchmarks.advice.loops import Loop
from benchmarks.advice.scripts import PAIRS

TOLERANCE: Final = 0.25
SECONDS: Final = 6.0
ROUNDS: Final = 12
CAPTURES: Final = 6


def judge(rule: str, seconds: float) -> list[str]:
    """Print what was predicted for a rule's slow loop and what was measured; return what is wrong."""
    times: dict[str, list[int]] = {"slow": [], "tuned": []}
    predicted: list[float] = []
    wrong: list[str] = []
    with Loop(rule, "slow") as slow, Loop(rule, "tuned") as tuned:
        count = max(3, round(seconds * 1e9 / (2 * ROUNDS * statistics.median(slow.steps(5)))))
        for number in range(ROUNDS):
            times["slow"] += slow.steps(count)
            times["tuned"] += tuned.steps(count)
            if number % (ROUNDS // CAPTURES) == 0:
                said = slow.advice()
                predicted += [each.saves_ns_per_step / 1e6 for each in said if each.rule == rule]
                if not said or said[0].rule != rule:
                    wrong.append(f"{rule} is not the first of {[each.rule for each in said]}")
        if rule in [each.rule for each in tuned.advice()]:
            wrong.append(f"{rule} is said of the loop that took the advice")
    before, after = (statistics.median(each) / 1e6 for each in times.values())
    saves = statistics.median(predicted) if predicted else 0.0
    ratio = saves / max(before - after, 1e-6)
    print(
        f"{rule:<24} {before:>9.2f} {after:>9.2f} {before - after:>9.2f} {saves:>9.2f} {ratio:>6.2f}",
        flush=True,
    )
    if not 1 - TOLERANCE <= ratio <= 1 + TOLERANCE:
        wrong.append(f"{rule} saves {before - after:.2f} ms a step, and {saves:.2f} ms were predicted")
    return wrong


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("rules", nargs="*", choices=[[], *PAIRS], metavar="RULE")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="how long both loops run together")
    options = parser.parse_args()
    print(f"{'rule':<24} {'slow ms':>9} {'tuned ms':>9} {'saved':>9} {'predicted':>9} {'ratio':>6}")
    wrong = [line for rule in options.rules or PAIRS for line in judge(rule, options.seconds)]
    if not options.rules:
        with Loop("well-tuned", "tuned") as loop:
            said = [advice.rule for advice in loop.advice()]
        print(f"{'well-tuned':<24} {', '.join(said) or 'nothing said'}")
        wrong += [f"{rule} is said of a well-tuned loop" for rule in said]
    for line in wrong:
        print(f"FAILED: {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
