"""``torchperfd completion``, and what shells complete: names of runs and jobs, captures and kept runs."""

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import click
from click.shell_completion import CompletionItem, get_completion_class

from torchperfd.runs.store import RunStore
from torchperfd.v1 import contract, control_pb2
from torchperfd_daemon.errors import TorchperfdError

_ANSWER_S: Final = 1.0

Completer = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def complete_runs(context: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the runs of the daemon."""
    return _items((run.run for run in _runs(context)), incomplete)


def complete_jobs(context: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the jobs of the daemon's runs."""
    return _items((run.job_name for run in _runs(context)), incomplete)


def complete_past_runs(context: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the runs of which the daemon knows the goodput, also those that have ended."""
    answer = _ask(
        context, lambda daemon: daemon.GetGoodput(control_pb2.GetGoodputRequest(), timeout=_ANSWER_S)
    )
    return _items((run.run for run in answer.runs), incomplete) if answer is not None else []


def complete_captures(context: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the ids of captures."""
    from torchperfd_cli.commands._capture_catalog import open_catalog

    named = _directory(context, "captures_dir")
    return _items(open_catalog(Path(named) if named else None).ids(), incomplete)


def complete_kept_runs(context: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the ids of kept runs."""
    return kept_run_items(_directory(context, "runs_dir"), incomplete)


def complete_traces(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Return the ids of captures; files where none begins so."""
    return [*complete_file(incomplete), *complete_captures(context, parameter, incomplete)]


def complete_sides(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Return the ids of kept runs and of captures; files where none begins so."""
    runs = complete_kept_runs(context, parameter, incomplete)
    return [*complete_traces(context, parameter, incomplete), *runs]


def complete_file(incomplete: str, *, only_directories: bool = False) -> list[CompletionItem]:
    """Return the request that the shell completes files itself; comes before any names."""
    return [CompletionItem(incomplete, type="dir" if only_directories else "file")]


def kept_run_items(directory: str, incomplete: str) -> list[CompletionItem]:
    """Return the ids of the runs kept in a directory; in this user's own where it is empty."""
    with contextlib.suppress(OSError):
        return _items(
            (run.run_id for run in RunStore(directory or contract.user_runs_dir()).list()), incomplete
        )
    return []


def _runs(context: click.Context) -> Iterable[control_pb2.Run]:
    fleet = bool(context.params.get("fleet"))
    request = control_pb2.ListRunsRequest(fleet=fleet)
    answer = _ask(context, lambda daemon: daemon.ListRuns(request, timeout=_ANSWER_S))
    return answer.runs if answer is not None else ()


def _ask(context: click.Context, ask: Callable[[Any], Any]) -> Any:
    """Return the answer of the daemon that the command line names; None without one."""
    from torchperfd_cli.commands._daemon import connect

    socket = context.params.get("socket")
    with contextlib.suppress(TorchperfdError, OSError), connect(socket, answer_seconds=_ANSWER_S) as daemon:
        return ask(daemon)
    return None


def _directory(context: click.Context, name: str) -> str:
    """Return the directory that an option of the command or of its group names; empty without one."""
    given = context.params.get(name) or (context.parent.params.get(name) if context.parent else None)
    return str(given or "")


def _items(names: Iterable[str], incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in sorted(set(names)) if name and name.startswith(incomplete)]


_VARIABLE = "_TORCHPERFD_COMPLETE"


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def command(context: click.Context, shell: str) -> None:
    """Print a script that makes a shell complete commands, options, names of runs and ids of captures."""
    kind = get_completion_class(shell)
    if kind is None:
        raise click.BadParameter(f"{shell} is not known to click", context)
    root = context.find_root()
    click.echo(kind(root.command, {}, "torchperfd", _VARIABLE).source())
