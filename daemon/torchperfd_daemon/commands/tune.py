"""``torchperfd tune``."""

import json
import time
from pathlib import Path
from typing import Final

import click

from torchperfd.runs.advised_run import newest_advised
from torchperfd.tune.candidates import Requested
from torchperfd.tune.changes import LOADER, OPTIMIZER, THREADS, ZERO_GRAD
from torchperfd.tune.edits import suggest_edits
from torchperfd.tune.search import TuningSearch
from torchperfd.tune.trial_process import ScriptTrials, TrialFailedError, TrialScript
from torchperfd.tune.tune_text import tune_document, tune_text
from torchperfd_daemon.commands._fit import terminal_width
from torchperfd_daemon.commands._measuring import results_on_sigterm, warn_if_busy
from torchperfd_daemon.commands._runs_dir import open_runs, runs_dir_option
from torchperfd_daemon.commands._status_line import StatusLine
from torchperfd_daemon.errors import NoSuchTargetError, UsageError
from torchperfd_daemon.text import printable
from torchperfd_daemon.worker_cost import of_this_machine

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
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def command(
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
    if script.missing():
        raise NoSuchTargetError(f"there is no file {target}", "is the path right?")
    click.echo(
        "torchperfd: the script runs several times in this directory, and writes its files each time",
        err=True,
    )
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
    if as_json:
        click.echo(json.dumps(tune_document(found, edits, took)))
    else:
        click.echo(printable(tune_text(found, edits, took, terminal_width())))
    return {"interrupted": interruption.exit_code, "time": _TIME_IS_UP}.get(found.ended, 0)
