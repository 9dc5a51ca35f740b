"""Where the ranks of a capture are analysed: in processes of this machine, or on the workers of Dask.

Progress is shown on a terminal.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import click

from torchperfd_cli.commands._options import Parsed
from torchperfd_cli.commands._output import can_redraw, note
from torchperfd_daemon import analysis
from torchperfd_daemon.config.kinds import parse_size
from torchperfd_daemon.errors import DaemonUnreachableError, TorchperfdError, UsageError

_CONNECT_S: Final = 10
FIRST_WORKER_S: Final = 600
"""How long to wait for a first worker, which Slurm or Kubernetes may have to start."""
_ADDRESS: Final = "write it like tcp://host:8786, or tls://host:8786"

dask_option = click.option(
    "--dask",
    metavar="ADDRESS",
    help="Scheduler of Dask on whose workers the ranks are analysed, such as tcp://host:8786; "
    "they read TRACE themselves.",
)
memory_option = click.option(
    "--worker-memory",
    type=Parsed("size", parse_size),
    metavar="SIZE",
    help="Most memory for the analysis of one rank, such as 2GiB; a rank that needs more is missing.",
)


def analyse_ranks(
    files: Sequence[analysis.RankFile], request: analysis.Request, workers: int | None, dask: str | None
) -> Iterator[analysis.Answer]:
    """Yield each rank's answer, in the order of ``files``; show progress on stderr if that is a terminal.

    Args:
        workers: Local processes at once; None for one a core.
        dask: Address of a scheduler whose workers do it instead; None for local processes.

    Raises:
        UsageError: Both are given, or the address is none.
        DaemonUnreachableError: No scheduler answers there, or it gets no worker.
        TorchperfdError: Dask is not installed.
    """
    if dask is None:
        with _progress(len(files)) as on_done:
            yield from analysis.analyse(files, request, workers, on_done=on_done)
        return
    if workers is not None:
        raise UsageError("--workers is for processes of this machine", "leave it out with --dask")
    # The workers have a current directory of their own.
    files = [
        replace(file, path=file.path.absolute()) if isinstance(file.path, Path) else file for file in files
    ]
    with _dask_executor(dask) as executor, _progress(len(files)) as on_done:
        yield from analysis.analyse(files, request, executor=executor, on_done=on_done)


@contextlib.contextmanager
def _dask_executor(address: str) -> Iterator[Executor]:
    """Connect to a scheduler; at the end cancel what its workers still do for this command."""
    try:
        import distributed
    except ImportError as error:
        raise TorchperfdError(
            "--dask needs the package distributed", "`pip install distributed`, as on the workers"
        ) from error
    if "://" not in address:
        raise UsageError(f"{address[:80]!r} is no address of a Dask scheduler", _ADDRESS)
    try:
        open_client: Callable[..., Any] = distributed.Client
        client = open_client(address, timeout=_CONNECT_S, set_as_default=False)
    except (OSError, ValueError) as error:
        raise DaemonUnreachableError(
            f"no Dask scheduler answers at {address[:80]}", f"start one with `dask scheduler`; {_ADDRESS}"
        ) from error
    with client:
        if not client.nthreads():
            note(f"torchperfd: {address} has no worker yet; waiting up to {FIRST_WORKER_S} s for one")
            try:
                client.wait_for_workers(1, timeout=FIRST_WORKER_S)
            except TimeoutError as error:
                raise DaemonUnreachableError(
                    f"{address[:80]} has had no worker for {FIRST_WORKER_S} s",
                    f"start one with `dask worker {address[:80]}`",
                ) from error
        # Tasks get names of their own: results of an earlier command never answer this one.
        executor = client.get_executor(pure=False)
        try:
            yield executor
        finally:
            executor.shutdown(wait=False)


@contextlib.contextmanager
def _progress(ranks: int) -> Iterator[Callable[[], None]]:
    """Show a bar of the ranks that have an answer; yield what counts one."""
    if ranks < 2 or not can_redraw():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("ranks"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True, highlight=False), transient=True) as bar:
        task = bar.add_task("", total=ranks)
        yield lambda: bar.advance(task)
