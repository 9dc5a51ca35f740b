"""``torchperfd bench dataloader``."""

import json
from typing import Any

import click

from torchperfd.bench.loader_bench import bench_loader
from torchperfd.bench.loader_measurer import LoaderProcess
from torchperfd.bench.loader_text import loader_text
from torchperfd.bench.search import SearchSpace, search_space
from torchperfd.bench.settings import LoaderDescription, LoaderSetting
from torchperfd.model.loader_workers import MAX_WORKERS
from torchperfd_daemon.commands._fit import terminal_width
from torchperfd_daemon.commands._measuring import results_on_sigterm, warn_if_busy
from torchperfd_daemon.commands._numbers import Numbers
from torchperfd_daemon.commands._status_line import StatusLine
from torchperfd_daemon.errors import UsageError
from torchperfd_daemon.text import printable
from torchperfd_daemon.worker_cost import of_this_machine


class _Methods(click.ParamType):  # type: ignore[type-arg] # generic from click 8.2 on
    """Start methods of multiprocessing, separated by commas."""

    name = "methods"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return them as a tuple."""
        words = tuple(value) if isinstance(value, tuple) else tuple(value.split(","))
        if not set(words) <= {"fork", "spawn", "forkserver"}:
            self.fail(f"{value!r} is no list of fork, spawn and forkserver", param, ctx)
        return words


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
@click.option("--batch-sizes", type=Numbers(), default=(), help="Batch sizes to try, such as 32,64,128.")
@click.option("--threads", type=Numbers(), default=(), help="Numbers of operator threads to try.")
@click.option("--start-methods", type=_Methods(), default=(), help="Of workers: fork, spawn, forkserver.")
@click.option(
    "--timeout",
    type=click.FloatRange(1, 3600),
    default=60.0,
    show_default=True,
    help="Seconds to wait for the loader, and for a first batch.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def command(
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
    if as_json:
        click.echo(json.dumps(found.to_dict()))
    else:
        click.echo(printable(loader_text(found, terminal_width())))
    return 0 if found.is_complete else interruption.exit_code
