"""``torchperfd tune``, and its result for people and as JSON."""

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import click

from torchperfd.document.blocks import Block, Code, Document, Facts, Sentences
from torchperfd.model.formatting import duration
from torchperfd_cli.bench.functions import Comparison
from torchperfd_cli.commands._options import json_option, open_runs, runs_dir_option
from torchperfd_cli.commands._output import StatusLine, emit, note, results_on_sigterm, warn_if_busy
from torchperfd_cli.tune.candidates import Requested
from torchperfd_cli.tune.edits import Edits, suggest_edits
from torchperfd_cli.tune.search import Tuning, TuningSearch, newest_advised
from torchperfd_cli.tune.trial import ANY, LOADER, OPTIMIZER, THREADS, ZERO_GRAD, Change, ScriptFacts
from torchperfd_cli.tune.trial_process import ScriptTrials, TrialFailedError, TrialScript
from torchperfd_daemon.errors import NoSuchTargetError, UsageError
from torchperfd_daemon.worker_cost import of_this_machine

SCHEMA: Final = "torchperfd.tune/1"
_ENDED: Final = {
    "interrupted": "by Ctrl-C; this is what had been verified until then",
    "time": "by the time limit; this is what had been verified until then (more time: --limit)",
}
_NAMES: Final = len("advised   ")
_UNVERIFIED: Final = {
    "interrupted": "Ctrl-C came before these",
    "time": "the time limit came before these",
}


def people_document(found: Tuning, edits: Edits, seconds: float) -> Document:
    """Return the result for people: what was gained, each change that was tried, and the edit."""
    facts = found.unchanged.facts
    kept = [
        (_code(each.change, facts), f"{gain_words(each.beside)}; {each.losses.words}") for each in found.kept
    ]
    dropped = [(_code(each.change, facts), each.reason) for each in found.dropped]
    sections: list[list[Block]] = [[Facts(_outcome(found, seconds), column=_NAMES)]]
    for title, rows in (("kept", kept), ("not kept", dropped)):
        changes: list[Block] = []
        for code, words in rows:
            changes += [Sentences([code], indent=2), Sentences([words], indent=6)]
        if changes:
            sections.append([Sentences([title]), *changes])
    if found.skipped:
        sections.append([Sentences(["not tried"]), Sentences(found.skipped, indent=2)])
    if found.kept:
        diff, rest = Code(edits.diff.splitlines(), indent=2), Sentences(edits.sentences, indent=2)
        sections.append([Sentences(["edit"]), diff, rest])
    return Document(sections)


def _outcome(found: Tuning, seconds: float) -> list[tuple[str, str]]:
    """Return facts; one without a name continues the one before."""
    lines = [("took", duration(seconds))]
    if found.ended:
        lines.append(("ended", _ENDED[found.ended]))
    lines.append(("step", f"{duration(found.unchanged.step_seconds)}, as the script is"))
    if found.total is not None:
        lines.append(("tuned", gain_words(found.total)))
    elif found.kept:
        why = _UNVERIFIED.get(found.ended) or f"these failed: {found.unverified}"
        lines.append(("tuned", f"not verified in new processes: {why}"))
        lines.append(("", "the gains below are of one pair of processes for each change"))
    else:
        lines.append(("tuned", "nothing that was tried is certainly faster"))
        best = found.best_dropped
        if best is not None and best.beside is not None:
            name = _code(best.change, found.unchanged.facts)
            lines.append(("best", f"{name}: {gain_words(best.beside)}"))
    if (advice := found.advice) is not None:
        lines.append(("advised", f"{advice.setting}, for {duration(advice.step_seconds)} a step,"))
        by = f"the card of the run {found.advised_by}" if found.advised_by else "the rule of diagnose"
        lines.append(("", f"by {by}"))
    if found.repeated == ANY:
        lines.append(("losses", "not checked: two unchanged runs differ, or no losses were seen"))
    return lines


def tune_document(found: Tuning, edits: Edits, seconds: float) -> dict[str, Any]:
    """Return the document of schema ``torchperfd.tune/1``."""
    facts = found.unchanged.facts
    total, advice = found.total, found.advice
    counted = advice if advice is not None and advice.rule == "loader-workers" else None
    return {
        "schema": SCHEMA,
        "step_seconds": found.unchanged.step_seconds,
        "phases_seconds": dict(found.unchanged.phases),
        "is_deterministic": found.repeated != ANY,
        "advice": None if advice is None else asdict(advice),
        "advised_by": found.advised_by or None,
        "advised_workers": counted.workers if counted else None,
        "advised_step_seconds": counted.step_seconds if counted else None,
        "speedup": _speedup(total) if total is not None else None,
        "kept": [
            {
                **each.change.to_dict(),
                "code": _code(each.change, facts),
                "speedup": _speedup(each.beside),
                "losses": each.losses.result,
                "losses_words": each.losses.words,
            }
            for each in found.kept
        ],
        "not_kept": [
            {
                **each.change.to_dict(),
                "code": _code(each.change, facts),
                "reason": each.reason,
                "speedup": _speedup(each.beside) if each.beside is not None else None,
            }
            for each in found.dropped
        ],
        "not_tried": found.skipped,
        "edits": asdict(edits),
        "took_seconds": seconds,
        "is_complete": not found.ended,
        "ended": found.ended or None,
        "unverified": found.unverified or None,
    }


def gain_words(beside: Comparison) -> str:
    """Return how much faster something is, with its interval."""
    return f"{1 / beside.ratio:.2f} times as fast (95 %: {1 / beside.high:.2f} to {1 / beside.low:.2f})"


def _speedup(beside: Comparison) -> dict[str, float]:
    return {"ratio": 1 / beside.ratio, "low": 1 / beside.high, "high": 1 / beside.low}


def _code(change: Change, facts: ScriptFacts) -> str:
    names: tuple[str, ...] = ()
    if change.target == LOADER:
        names = tuple(each.name for each in facts.loaders)
    elif change.target == OPTIMIZER:
        names = tuple(each.name for each in facts.optimizers)
    return change.code(names[0] if len(set(names)) == 1 else "")


_TIME_IS_UP: Final = 124


@click.command("tune", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGS]...")
@click.option("-m", "module", metavar="MODULE", help="Run a module, as python -m does, instead of a script.")
@click.option(
    "--seconds",
    type=click.FloatRange(0.1, 600),
    default=2.0,
    show_default=True,
    help="To measure steps for, in each run of the script.",
)
@click.option(
    "--steps",
    type=click.IntRange(3, 100_000),
    default=8,
    show_default=True,
    help="The fewest steps to measure in each run.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(1, 36000),
    default=120.0,
    show_default=True,
    help="Seconds for each run, from its start.",
)
@click.option(
    "--limit",
    type=click.FloatRange(1, 360000),
    default=900.0,
    show_default=True,
    help="Seconds for all runs: none begins that would usually not end within them.",
)
@click.option(
    "--only",
    type=click.Choice([LOADER, OPTIMIZER, ZERO_GRAD, THREADS]),
    multiple=True,
    help="Try only changes of this; may be repeated.",
)
@click.option("--amp", is_flag=True, help="Try bfloat16 autocast also; it changes what is computed.")
@click.option(
    "--compile", "compiles", is_flag=True, help="Try model.compile() also; raise --timeout with it."
)
@click.option(
    "--matmul-precision",
    type=click.Choice(["high", "medium"]),
    help="Try this precision of float32 products also; it changes what is computed.",
)
@runs_dir_option
@json_option
def tune_command(
    words: tuple[str, ...],
    module: str | None,
    seconds: float,
    steps: int,
    timeout: float,
    limit: float,
    only: tuple[str, ...],
    amp: bool,
    compiles: bool,
    matmul_precision: str | None,
    runs_dir: Path | None,
    as_json: bool,
) -> int:
    """Find settings under which a training script is faster, and verify the gain.

    The script runs several times for some seconds each, here and with its arguments, and is then ended: files
    that it writes are written again each time. What is tried is changed in memory only; nothing on disk is.
    Options come before the script; what follows it belongs to the script.
    """
    if module is None and not words:
        raise UsageError("no script given", "write `torchperfd tune SCRIPT`")
    if module is None and words[0].startswith("-"):
        raise click.NoSuchOption(words[0], ctx=click.get_current_context())
    target, arguments = (module, words) if module is not None else (words[0], words[1:])
    script = TrialScript(target, arguments, module is not None, seconds, steps, timeout)
    if module is None and not Path(target).is_file():
        raise NoSuchTargetError(f"there is no file {target}", "is the path right?")
    note("torchperfd: the script runs several times in this directory, and writes its files each time")
    warn_if_busy()
    began = time.monotonic()
    with StatusLine() as status, results_on_sigterm() as interruption:
        requested = Requested(amp, compiles, matmul_precision or "", only)
        try:
            search = TuningSearch(
                ScriptTrials(script),
                requested,
                time.monotonic,
                limit,
                status.show,
                of_this_machine(),
                None if module is not None else newest_advised(open_runs(runs_dir), target),
            )
            found = search.tune()
        except TrialFailedError as error:
            problem = f"the script as it is cannot be measured: {error.problem}"
            raise TrialFailedError(problem, exit_code=error.exit_code) from error
    took = time.monotonic() - began
    edits = suggest_edits(found.changes, found.unchanged.facts, "" if module is not None else target)
    emit((tune_document if as_json else people_document)(found, edits, took))
    return {"interrupted": interruption.exit_code, "time": _TIME_IS_UP}.get(found.ended, 0)
