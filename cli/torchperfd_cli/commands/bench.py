"""``torchperfd bench``: ``dataloader`` and ``compare``."""

import json
from typing import Any

import click

from torchperfd.model.loader_facts import MAX_WORKERS
from torchperfd_cli.bench.functions import MIN_ROUNDS, bench_functions, functions_document
from torchperfd_cli.bench.loader_bench import bench_loader, loader_document
from torchperfd_cli.bench.loader_process import LoaderDescription, LoaderProcess, LoaderSetting
from torchperfd_cli.bench.search import SearchSpace, search_space
from torchperfd_cli.commands._options import NUMBERS, SHARE, Parsed, json_option
from torchperfd_cli.commands._output import StatusLine, emit, results_on_sigterm, warn_if_busy
from torchperfd_daemon.errors import SlowerError, UsageError
from torchperfd_daemon.worker_cost import of_this_machine


def _methods(text: str) -> tuple[str, ...]:
    methods = tuple(text.split(","))
    if not set(methods) <= {"fork", "spawn", "forkserver"}:
        raise ValueError(f"{text!r} is no list of fork, spawn and forkserver")
    return methods


_METHODS = Parsed("methods", _methods)


@click.command("dataloader")
@click.argument("target", metavar="MODULE:NAME")
@click.option(
    "--seconds",
    type=click.FloatRange(0.05, 600),
    default=1.0,
    show_default=True,
    help="To measure each setting.",
)
@click.option(
    "--max-workers",
    type=click.IntRange(0, 512),
    help=f"The most workers to try; by default twice the CPUs, at most {MAX_WORKERS}.",
)
@click.option("--batch-sizes", type=NUMBERS, default=(), help="Batch sizes to try, such as 32,64,128.")
@click.option("--threads", type=NUMBERS, default=(), help="Numbers of operator threads to try.")
@click.option("--start-methods", type=_METHODS, default=(), help="Of workers: fork, spawn, forkserver.")
@click.option(
    "--timeout",
    type=click.FloatRange(1, 3600),
    default=60.0,
    show_default=True,
    help="Seconds to wait for the loader, and for a first batch.",
)
@json_option
def dataloader(
    target: str,
    seconds: float,
    max_workers: int | None,
    batch_sizes: tuple[int, ...],
    threads: tuple[int, ...],
    start_methods: tuple[str, ...],
    timeout: float,
    as_json: bool,
) -> int:
    """Find the settings under which a DataLoader is fastest.

    MODULE:NAME, or FILE.py:NAME, is a DataLoader, or a function without arguments that returns one. If the
    function returns a loader and a second function that trains on one batch, the two are measured together,
    and so is the ceiling: the training step with batches that are in memory already.

    The batch size is varied only with --batch-sizes, because it changes what is trained.
    """
    if ":" not in target:
        raise UsageError(f"{target!r} names no loader", "write MODULE:NAME or FILE.py:NAME")

    def space(facts: LoaderDescription) -> SearchSpace:
        return search_space(
            facts,
            most_workers=max_workers,
            batch_sizes=batch_sizes,
            threads=threads,
            start_methods=start_methods,
        )

    warn_if_busy()
    with (
        LoaderProcess(target, seconds, timeout) as measurer,
        StatusLine() as status,
        results_on_sigterm() as interruption,
    ):

        def progress(count: int, setting: LoaderSetting) -> None:
            status.show(f"{count} measured, now {setting.code()}")

        found = bench_loader(target, measurer, space, progress, of_this_machine())
    emit(found.to_dict() if as_json else loader_document(found))
    return 0 if found.is_complete else interruption.exit_code


def _parameter(text: str) -> tuple[str, list[Any]]:
    """Return a name and its values, from ``batch_size=1,32``; a value is JSON, or else a text."""
    name, equals, values = text.partition("=")
    if not equals or not name.isidentifier() or not values:
        raise ValueError(f"{text!r} is no parameter such as batch_size=1,32")
    return name, [_value(word) for word in values.split(",")]


def _value(word: str) -> Any:
    try:
        return json.loads(word)
    except ValueError:
        return word


@click.command("compare")
@click.argument("targets", nargs=-1, required=True, metavar="MODULE:FUNCTION...")
@click.option(
    "--setup",
    default="",
    metavar="MODULE:FUNCTION",
    help="Called with the parameters, outside the timing; each function is called with what it returns.",
)
@click.option(
    "-p",
    "--parameter",
    "parameters",
    type=Parsed("parameter", _parameter),
    multiple=True,
    metavar="NAME=V1,V2",
    help="Values of a parameter; several parameters give every combination.",
)
@click.option("--threads", type=NUMBERS, default=(), help="Numbers of operator threads, such as 1,4.")
@click.option(
    "--seconds",
    type=click.FloatRange(0.01, 600),
    default=0.5,
    show_default=True,
    help="To time each function for, in each round.",
)
@click.option("--rounds", type=click.IntRange(min=MIN_ROUNDS), default=5, show_default=True, help="Rounds.")
@click.option(
    "--timeout",
    type=click.FloatRange(1, 36000),
    default=300.0,
    show_default=True,
    help="Seconds for the imports, and for each function beyond --seconds.",
)
@json_option
@click.option(
    "--fail-above",
    type=SHARE,
    metavar="PERCENT",
    help="Exit with code 7 if a function is slower than the first by more than this, such as 5%.",
)
def compare(
    targets: tuple[str, ...],
    setup: str,
    parameters: tuple[tuple[str, list[Any]], ...],
    threads: tuple[int, ...],
    seconds: float,
    rounds: int,
    timeout: float,
    as_json: bool,
    fail_above: float | None,
) -> None:
    """Time implementations of one thing side by side, with torch.utils.benchmark.

    The first function is what the others are compared with. All are timed in turn, round by round. A
    difference is shown only if it is more than the noise between rounds.
    """
    if len(targets) < 2:
        raise UsageError("compare needs two functions", "name a second MODULE:FUNCTION")
    by_name = dict(parameters)
    if len(by_name) < len(parameters):
        raise UsageError("a parameter is given twice", "write all its values in one: -p name=1,2")
    with StatusLine() as status:
        found = bench_functions(
            targets,
            setup=setup,
            parameters=by_name,
            threads=threads,
            seconds=seconds,
            rounds=rounds,
            timeout=timeout,
            progress=status.show,
        )
    emit(found.to_dict() if as_json else functions_document(found))
    slower = found.slower_than(fail_above) if fail_above is not None else []
    if slower:
        raise SlowerError(f"beyond the limit of {fail_above:.1%}: {'; '.join(slower)}")


@click.group("bench")
def bench_command() -> None:
    """Measure parts of a training script by themselves, in a process of their own."""


bench_command.add_command(dataloader)
bench_command.add_command(compare)
