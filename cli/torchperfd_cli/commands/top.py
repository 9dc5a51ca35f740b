"""``torchperfd top``."""

import importlib.util
import json
import sys
from dataclasses import asdict, replace
from typing import Any

import click
from rich.console import Console

from torchperfd_cli.commands._options import json_option, socket_option
from torchperfd_cli.commands._scope import Scope, scope_options
from torchperfd_cli.commands._series import SeriesOptions
from torchperfd_cli.commands._top_actions import TopActions
from torchperfd_cli.commands._top_feed import Feed, Reader
from torchperfd_cli.commands._top_lines import is_plain
from torchperfd_cli.commands._top_screen import Drawing
from torchperfd_cli.commands._top_state import Frame
from torchperfd_daemon.errors import PartialResultError, TorchperfdError


@click.command("top")
@scope_options
@socket_option
@json_option
def top_command(
    run: str, job: str, fleet: bool, series: SeriesOptions, socket: str | None, as_json: bool
) -> None:
    """Show runs, ranks, the node's GPUs and the verdict, twice a second, until q or Ctrl-C; ? shows all keys.

    Off a terminal, on one without control sequences (TERM=dumb) and with --json, one frame is printed.
    With --fleet or --job, the ranks of all nodes; daemons that do not answer are named (exit code 5).
    With --prometheus, the same from series, read every five seconds.
    """
    console = Console()
    scope = Scope(run, job, fleet, series)
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty() and not console.is_dumb_terminal
    if as_json or not is_terminal:
        _print(scope, socket, console, as_json=as_json)
        return
    if importlib.util.find_spec("textual") is None:
        raise TorchperfdError("textual is not installed, which draws `top`", "`pip install textual`")
    code = _follow(scope, socket, plain=is_plain(console))
    if code:
        raise SystemExit(code)


def _print(scope: Scope, socket: str | None, console: Console, *, as_json: bool) -> None:
    with scope.connect(socket, of_ranks=True) as daemon:
        frame = Reader(daemon, scope.whole(daemon)).read()
    if as_json:
        click.echo(json.dumps(_document(frame)))
    else:
        console.print(Drawing(replace(frame, problem="")))
    if frame.problem:
        raise PartialResultError(frame.problem)


def _follow(scope: Scope, socket: str | None, *, plain: bool) -> int:
    """Follow the runs on a terminal; return the exit code."""
    feed = Feed(scope, socket)
    feed.start()
    try:
        # While the daemon answers: this import takes most of the time in which `top` opens.
        from torchperfd_cli.commands._top_app import TopApp, run_app

        code = run_app(TopApp(feed, TopActions(socket, fleet=scope.fleet), plain=plain))
        feed.frame()
    finally:
        feed.stop()
    return code


def _document(frame: Frame) -> dict[str, Any]:
    from torchperfd.model.verdict_document import verdict_to_document
    from torchperfd_daemon.views import live

    return {
        "schema": "torchperfd.top/1",
        "node": {"name": frame.node, **asdict(frame.view)},
        "runs": [
            {
                **live.run_dict(run),
                "verdict": verdict_to_document(frame.verdicts[run.run])
                if run.run in frame.verdicts
                else None,
            }
            for run in frame.runs
        ],
    }
