"""Whether each rule that a CPU can show is right about real training loops.

    python -m benchmarks.advice [--seconds S] [SCRIPT ...]

For each rule some slow loops, and each with the advice taken, run alternately in separate processes. Now and
then the slow one is recorded and analysed: the rule's advice must come first. What it predicts, the median of
all recordings, must be within a quarter of what unprofiled steps were shorter by on average, the median of
all turns; beside it stands the same of the predicted share of the step. Of the tuned
loop's recording the rule must be silent, and there may be no advice about well-tuned loops.

As many loops, and more, are negative controls (`controls`). Any advice about one is followed, and the
loop before and after run alternately: it may not be slower, beyond noise. Exits 1 when a check fails.
"""

import argparse
import statistics
import sys
from typing import Final

from benchmarks.advice.controls import CONTROLS
from benchmarks.advice.following import NOISE, follow
from benchmarks.advice.loops import ALLOCATOR, Loop, Recording
from benchmarks.advice.scripts import SCRIPTS, WELL_TUNED

from torchperfd_daemon.worker_cost import of_this_machine

TOLERANCE: Final = 0.25
SECONDS: Final = 5.0
PROCESSES: Final = 3  # Where the memory of a process happens to lie changes its steps by several percent.
ROUNDS: Final = 6
FEWEST: Final = 8  # Steps of a turn.
CAPTURES: Final = 2
SAMPLED: Final = 2.5  # Seconds in which the client samples some draws.
CONTROL_ROW: Final = "{:<22} {:<25} {:>8} {:>9} {:>6}  {:<7}  {}"
ROW: Final = "{:<22} {:<25} {:<6} {:>8} {:>8} {:>9} {:>8} {:>6} {:>9}  {}"


def judge(name: str, seconds: float) -> list[str]:
    """Print a slow loop's predicted and measured saving; return what is wrong."""
    script = SCRIPTS[name]
    rounds: list[tuple[float, float]] = []
    recordings: list[Recording] = []
    wrong: list[str] = []
    tuned_recordings: list[Recording] = []
    for _ in range(PROCESSES):
        with Loop(name, "slow") as slow, Loop(name, "tuned") as tuned:
            if script.attached:
                # The client samples a draw a second.
                slow.steps(round(SAMPLED * 1e9 / statistics.median(slow.steps(5))))
            count = max(
                FEWEST, round(seconds * 1e9 / (2 * PROCESSES * ROUNDS * statistics.median(slow.steps(5))))
            )
            for number in range(ROUNDS):
                # Means: of steps that wait for a loader some are short and some are long.
                rounds.append((statistics.fmean(slow.steps(count)), statistics.fmean(tuned.steps(count))))
                if number % (ROUNDS // CAPTURES) == 0:
                    recordings.append(slow.record())
                    advice = recordings[-1].advice
                    if not advice or advice[0].rule != script.rule:
                        wrong.append(f"{script.rule} is not the first of {[each.rule for each in advice]}")
            tuned_recordings.append(tuned.record())
    first = not wrong
    again = [each.rule for each in _least_disturbed(tuned_recordings).advice]
    if not script.heard_again and script.rule in again:
        wrong.append(f"{script.rule} is advised to the loop that took the advice")
    slow_ms = statistics.median(before for before, _ in rounds) / 1e6
    saved = slow_ms * statistics.median(1 - after / before for before, after in rounds)
    found = [next((each for each in one.advice if each.rule == script.rule), None) for one in recordings]
    saves = statistics.median(each.saves_ns_per_step / 1e6 if each else 0.0 for each in found)
    of_step = statistics.median(each.share_of_step * slow_ms if each else 0.0 for each in found)
    ratio = saves / max(saved, 1e-6)
    if not 1 - TOLERANCE <= ratio <= 1 + TOLERANCE:
        wrong.append(f"{script.rule} saves {saved:.2f} ms a step, and {saves:.2f} ms were predicted")
    times = (slow_ms, slow_ms - saved, saves, saved, ratio, of_step / max(saved, 1e-6))
    figures = (f"{each:.2f}" for each in times)
    verdict = "wrong" if wrong else "right"
    print(ROW.format(script.rule, name, "yes" if first else "no", *figures, verdict), flush=True)
    return [f"{name}: {each}" for each in wrong]


def _least_disturbed(recordings: list[Recording]) -> Recording:
    """Return the one with the shortest steps: what disturbs a recording only ever adds to them."""
    return min(recordings, key=lambda each: each.step_ns)


def silent(name: str) -> list[str]:
    """Print the advice about a well-tuned loop, and return each as an error."""
    with Loop(name, "tuned") as loop:
        rules = [advice.rule for advice in loop.record().advice]
    verdict = "wrong" if rules else "right"
    print(ROW.format(", ".join(rules) or "no advice", name, *[""] * 7, verdict), flush=True)
    return [f"{name}: {rule} is advised to a well-tuned loop" for rule in rules]


def controlled(name: str, seconds: float) -> list[str]:
    """Print the advice about a control, and the saving; return the advice that makes it slower."""
    wrong = []
    for each in follow(name, seconds):
        saved = "" if each.saved is None else f"{each.saved:.0%}"
        verdict = "wrong" if each.is_wrong else "right"
        line = (each.rule or "no advice", name, f"{each.step_ms:.2f}", f"{each.predicted:.0%}", saved)
        print(CONTROL_ROW.format(*line, verdict, each.setting), flush=True)
        if each.is_wrong:
            why = f"saves {saved}" if saved else "cannot be followed"
            wrong.append(f"{name}: {each.rule} {why}, and {each.predicted:.0%} was predicted")
    return wrong


def _failed(reasons: list[str]) -> list[str]:
    """Print what is wrong with a loop below its row: a run is long, and may be ended early."""
    for reason in reasons:
        print(f"FAILED: {reason}", flush=True)
    return reasons


def main() -> int:
    loops, names = [*SCRIPTS, *WELL_TUNED], [*SCRIPTS, *WELL_TUNED, *CONTROLS]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("scripts", nargs="*", choices=[[], *names], metavar="SCRIPT")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="how long both loops run together")
    options = parser.parse_args()
    head = (
        "rule",
        "script",
        "first",
        "slow ms",
        "tuned ms",
        "predicted",
        "saved",
        "ratio",
        "by share",
        "verdict",
    )
    chosen = options.scripts or names
    print(f"a worker costs here: {of_this_machine()}")
    wrong = []
    if any(name in loops for name in chosen):
        print(ROW.format(*head))
    for name in chosen:
        if name in loops:
            wrong += _failed(judge(name, options.seconds) if name in SCRIPTS else silent(name))
    if any(name in CONTROLS for name in chosen):
        print(f"\nnegative controls; slower is more than {NOISE:.0%}")
        print(CONTROL_ROW.format("rule", "control", "step ms", "predicted", "saved", "verdict", "setting"))
    for name in chosen:
        if name in CONTROLS:
            wrong += _failed(controlled(name, options.seconds))
    print(f"allocator: {ALLOCATOR}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
