"""Run the fault suite: how often the daemon's verdict on jobs with a known fault is right.

    python -m benchmarks.faults [--only NAME] [--seeds 1-3] [--models mlp-ddp,…] [--quick] [--full]
    python -m benchmarks.faults --held-out [--peers]
    python -m benchmarks.faults --device simulated [--held-out]
    python -m benchmarks.faults --arm causes|busy|controls [--only NAME] [--quick]
    python -m benchmarks.faults --record DIR …
    python -m benchmarks.faults --replay DIR [--only NAME]

Each job is real training of several gloo ranks under `torchperfd run`, on a daemon of its own, well for some
140 to 180 steps, then with one fault, and, where the fault makes steps longer, without it again. The daemon
is asked for its verdict twice a second while there is the fault; the last answer counts. Each fault comes
once with every seed, cycling through the models. A job is run again, at most twice, if other processes took
more than 1 % of the processors, or if its steps without the fault differ by more than 5 % before and after
it; with --once never, which makes the bounds harder to meet. Thresholds may be chosen on development seeds
and models only; --held-out takes the others. With --peers the same jobs run under TraceML, too; for other
tools the reason for a missing column is printed.
Exits 1 when a bound is missed.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.faults import arms, catalog, peers, quota, recordings, replay, report
from benchmarks.faults.arms import ARMS, USUAL, Arm
from benchmarks.faults.catalog import Fault, Plan
from benchmarks.faults.figures import figures
from benchmarks.faults.trial import (
    QUICK_WATCH_SECONDS,
    WATCH_CONTROL_SECONDS,
    WATCH_EARLY_SECONDS,
    WATCH_HANG_SECONDS,
    WATCH_SECONDS,
    Trial,
    run,
)
from benchmarks.judge import exit_code, missed

FULL_RANKS: Final = 8
MAX_OTHERS: Final = 0.01
"""A job is run again if other processes took a larger share of the processors."""
MAX_DRIFT: Final = 0.05
"""A job is run again if its steps before and after the fault differ by more than this share."""
MAX_RUNS: Final = 3


def unable(faults: list[Fault]) -> dict[str, str]:
    """Return which faults cannot be injected here, and why."""
    reasons = arms.unable(faults)
    for fault in faults:
        if fault.name == "CPU quota" and (why := quota.why_not()):
            reasons[fault.name] = why
    return reasons


def numbers(text: str) -> list[int]:
    """Return the numbers of a list such as ``1-3,7``.

    Raises:
        argparse.ArgumentTypeError: The list is malformed.
    """
    try:
        pairs = [(part.partition("-")[0], part.rpartition("-")[2]) for part in text.split(",")]
        return [number for first, last in pairs for number in range(int(first), int(last) + 1)]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no list such as 1-3,7") from error


def known_models(text: str) -> list[str]:
    """Return the models of a list with commas.

    Raises:
        argparse.ArgumentTypeError: One of them is not known.
    """
    models = text.split(",")
    for model in models:
        if model not in catalog.MODELS:
            raise argparse.ArgumentTypeError(f"no model {model}; there are {', '.join(catalog.MODELS)}")
    return models


def watch_seconds(fault: Fault, *, quick: bool) -> float:
    """Return how long a job with this fault is watched after its onset."""
    if fault.hangs or fault.name == "one long checkpoint":
        return WATCH_HANG_SECONDS
    if fault.is_early:
        return WATCH_CONTROL_SECONDS if fault.is_control else WATCH_EARLY_SECONDS
    return QUICK_WATCH_SECONDS if quick else WATCH_SECONDS


def run_all(
    chosen: Iterable[Plan], job: Callable[[Plan], Trial], json_file: Path | None = None
) -> list[Trial]:
    """Run one job after the other, printing a line for each."""
    trials = []
    print(f"\n{report.head()}", flush=True)
    for plan in chosen:
        trial = job(plan)
        trials.append(trial)
        print(report.line(trial), flush=True)
        if json_file:
            with json_file.open("a") as file:
                file.write(f"{json.dumps(trial.to_dict())}\n")
    return trials


def run_alone(plan: Plan, job: Callable[[Plan], Trial]) -> Trial:
    """Run a job, and again while its steps are disturbed; the last run counts.

    The answers do not decide whether it is run again.
    """
    trial = job(plan)
    for _ in range(MAX_RUNS - 1):
        if trial.others <= MAX_OTHERS and trial.measured.drift <= MAX_DRIFT:
            break
        print(report.disturbed(trial), flush=True)
        trial = job(plan)
    return trial


def by_split(trials: Sequence[Trial]) -> dict[str, list[Trial]]:
    """Return trials by the part of the suite that they belong to."""
    parts: dict[str, list[Trial]] = {}
    for trial in trials:
        parts.setdefault(catalog.split(trial.plan.seed, trial.plan.model), []).append(trial)
    return parts


def judge(arm: Arm, trials: Sequence[Trial]) -> int:
    """Print the scores of jobs, and return 1 if a bound is missed."""
    problems: list[str] = []
    for part, own in by_split(trials).items():
        print(f"\n{report.summary(part, arm, own)}")
        problems += [f"{part}: {each}" for each in missed(figures(arm, own))]
    return exit_code(problems)


def compare(chosen: Sequence[Plan]) -> None:
    """Print the answers of other tools for the same jobs."""
    print("\nother tools")
    for name, why in peers.others().items():
        print(f"{name}: {why}")
    if why := peers.absent():
        print(f"{peers.TRACEML}: does not install: {why}")
        return
    for part, own in by_split(run_all(chosen, peers.run)).items():
        print(f"\n{report.summary(f'{peers.TRACEML}, {part}', ARMS[USUAL], own)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--arm",
        choices=ARMS,
        default=USUAL,
        help=f"which jobs; by default {USUAL}",
    )
    parser.add_argument("--only", action="append", metavar="NAME", help="faults whose name has this in it")
    parser.add_argument("--seeds", type=numbers, help="such as 1-3,7; by default those of development")
    parser.add_argument("--models", type=known_models, help="with commas")
    parser.add_argument("--device", choices=(catalog.CPU, catalog.SIMULATED), default=catalog.CPU)
    parser.add_argument(
        "--held-out", action="store_true", help="the seeds and models that nothing was chosen on"
    )
    parser.add_argument("--quick", action="store_true", help="one seed, and one fault of most classes")
    parser.add_argument("--full", action="store_true", help=f"{FULL_RANKS} ranks instead of {catalog.RANKS}")
    parser.add_argument("--once", action="store_true", help="run no job again, whatever disturbed it")
    parser.add_argument("--peers", action="store_true", help="other tools, too; installs them in .venv-peers")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the results, one line per job")
    parser.add_argument(
        "--record", type=Path, metavar="DIR", help="keep what diagnosis was given in each job"
    )
    parser.add_argument(
        "--replay", type=Path, metavar="DIR", help="run no job: have diagnosis judge the recordings again"
    )
    options = parser.parse_args()
    if options.replay:
        return judge(ARMS[options.arm], replay.trials(options.replay, options.only or ()))
    arm = ARMS[options.arm]
    seeds = options.seeds or [*(catalog.HELD_OUT_SEEDS if options.held_out else catalog.DEVELOPMENT_SEEDS)]
    models = options.models or [*catalog.models_of(options.device, held_out=options.held_out)]
    able = {
        model for held_out in (False, True) for model in catalog.models_of(options.device, held_out=held_out)
    }
    if unable_models := [model for model in models if model not in able]:
        parser.error(f"{', '.join(unable_models)}: only with --device {catalog.SIMULATED}")
    faults = [
        fault
        for fault in arm.faults
        if options.device in fault.devices and (fault.in_quick or not options.quick)
    ]
    if options.only:
        faults = [fault for fault in faults if any(part in fault.name for part in options.only)]
    if not faults:
        parser.error(f"no such fault; there are {', '.join(fault.name for fault in arm.faults)}")
    not_run = unable(faults)
    faults = [fault for fault in faults if fault.name not in not_run]
    named = {fault.name: fault for fault in faults}
    chosen = catalog.plans(
        faults,
        seeds[:1] if options.quick else seeds,
        models,
        FULL_RANKS if options.full else catalog.RANKS,
        options.device,
    )
    for part, held_out in (("development", False), ("held out", True)):
        known = catalog.HELD_OUT_SEEDS if held_out else catalog.DEVELOPMENT_SEEDS
        print(
            f"{part}: seeds {known}, models {', '.join(catalog.models_of(options.device, held_out=held_out))}"
        )
    for name, why in not_run.items():
        print(f"not run: {name}: {why}")
    print(f"{len(chosen)} jobs, load {_load()} before the start")

    def once(plan: Plan) -> Trial:
        fault = named[plan.fault]
        keep = partial(recordings.write, options.record) if options.record else None
        return run(arm.on(plan), watch_seconds(fault, quick=options.quick), heal=fault.costs, keep=keep)

    trials = run_all(chosen, once if options.once else lambda plan: run_alone(plan, once), options.json)
    most = max(trial.others for trial in trials)
    print(
        f"\nload {_load()} at the end; others took at most {most:.1%} of the processors; times in ms per step"
    )
    failed = judge(arm, trials)
    if options.peers:
        compare(chosen)
    return failed


def _load() -> str:
    return Path("/proc/loadavg").read_text().split()[0]


if __name__ == "__main__":
    sys.exit(main())
