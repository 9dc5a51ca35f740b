"""Tune six scripts, make the edits, and measure the edited script beside the original for longer.

    python -m benchmarks.tune [--only NAME] [--pairs 12] [--seconds 2]

Exits 1 if a verified gain is off by more than 10 % from that of the longer run, if losses that are claimed to
be equal are not, if a script that can be faster stays as it is, or if the well-tuned one becomes slower.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from benchmarks.judge import exit_code

from torchperfd_cli.bench.functions import Comparison, compare_rounds
from torchperfd_cli.tune.candidates import Requested
from torchperfd_cli.tune.edits import suggest_edits
from torchperfd_cli.tune.search import Tuning, TuningSearch
from torchperfd_cli.tune.trial import CLOSE, check_losses, repeats
from torchperfd_cli.tune.trial_process import ScriptTrials, TrialScript, fresh_pair

_SCRIPTS: Final = Path(__file__).parent / "scripts"
_NAMES: Final = (
    *("slow_loader", "many_tensors", "zeroed_gradients"),
    *("many_threads", "well_tuned", "combination"),
)
_BOUND: Final = 0.10
_LIMIT_S: Final = 400.0


def main() -> int:
    """Print a table; return 1 where a bound does not hold."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=_NAMES)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement of the longer run")
    options = parser.parse_args()
    print("| script | kept | verified | longer run | ratio | losses | tuning took |")
    print("|---|---|---|---|---|---|---|", flush=True)
    complaints = []
    for name in (options.only,) if options.only else _NAMES:
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(_SCRIPTS / f"{name}.py", folder)
            os.chdir(folder)
            complaints += _tune(name, options.pairs, options.seconds)
            os.chdir("/")
    return exit_code(complaints)


def _tune(name: str, pairs: int, seconds: float) -> list[str]:
    path = Path.cwd() / f"{name}.py"
    script = TrialScript(str(path), (), False, 2.0, 8, 120.0)
    began = time.monotonic()
    search = TuningSearch(ScriptTrials(script), Requested(), time.monotonic, _LIMIT_S, lambda _: None)
    found = search.tune()
    took = time.monotonic() - began
    if found.total is None:
        print(f"| {name} | nothing | 1 | | | | {took:.0f} s |", flush=True)
        return [] if name == "well_tuned" else [f"{name}: nothing was kept"]
    edits = suggest_edits(found.changes, found.unchanged.facts, str(path))
    edited = Path.cwd() / "edited" / path.name
    edited.parent.mkdir()
    shutil.copy(path, edited)
    subprocess.run(["git", "apply", "-p1", "-"], input=edits.diff.encode(), cwd=edited.parent, check=True)
    other = TrialScript(str(edited), (), False, 2.0, 8, 120.0)
    losses, are_equal = _losses(script, other)
    longer = _measure(script, other, pairs, seconds)
    verified = found.total
    ratio = longer.ratio / verified.ratio
    codes = ", ".join(change.arguments for change in found.changes)
    gains = f"{_words(verified)} | {_words(longer)} | {ratio:.3f}"
    print(f"| {name} | {codes} | {gains} | {losses} | {took:.0f} s |", flush=True)
    return list(_complaints(name, found, longer, are_equal=are_equal, sentences=edits.sentences))


def _complaints(
    name: str, found: Tuning, longer: Comparison, *, are_equal: bool, sentences: tuple[str, ...]
) -> list[str]:
    assert found.total is not None
    complaints = [f"{name}: {each} is not in the diff" for each in sentences]
    ratio = longer.ratio / found.total.ratio
    if abs(ratio - 1) > _BOUND:
        complaints.append(f"{name}: the verified gain is off by {ratio - 1:+.1%}")
    if longer.low > 1:
        complaints.append(f"{name}: the edited script is slower")
    if not are_equal:
        complaints.append(f"{name}: the losses differ")
    return complaints


def _losses(script: TrialScript, edited: TrialScript) -> tuple[str, bool]:
    unchanged, again, changed = (ScriptTrials(each).run(()) for each in (script, script, edited))
    checked = check_losses(unchanged, changed, CLOSE, repeats(unchanged, again))
    return checked.result, checked.is_allowed


def _measure(script: TrialScript, edited: TrialScript, pairs: int, seconds: float) -> Comparison:
    # Each of the two measurements of a pair takes a quarter of a run's time.
    first, second = (
        TrialScript(each.target, (), False, 4 * seconds, 8, each.timeout) for each in (script, edited)
    )
    found = [fresh_pair((first, ()), (second, ())) for _ in range(pairs)]
    return compare_rounds(*zip(*found, strict=True))


def _words(beside: Comparison) -> str:
    return f"{1 / beside.ratio:.2f} ({1 / beside.high:.2f} to {1 / beside.low:.2f})"


if __name__ == "__main__":
    sys.exit(main())
