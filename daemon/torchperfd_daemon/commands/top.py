"""``torchperfd top``."""

import json
import time
from dataclasses import asdict, replace
from typing import Any, Final

import click
from rich.console import Console
from rich.live import Live

from torchperfd.v1 import control_pb2
from torchperfd_daemon.commands._daemon import connect
from torchperfd_daemon.commands._keys import Keys
from torchperfd_daemon.commands._options import json_option, socket_option
from torchperfd_daemon.commands._scope import Scope, missing, scope_options
from torchperfd_daemon.commands._screen import Frame, draw
from torchperfd_daemon.errors import PartialResultError, TorchperfdError
from torchperfd_daemon.views import live as _view
from torchperfd_daemon.views import node_view as _node_view
from torchperfd_daemon.views.verdicts import verdict_dict

_TIMEOUT_S: Final = 5.0
_EVERY_S: Final = 0.5
_NEWEST_STEPS: Final = 64
"""Few enough to show changes quickly, enough to distinguish a slow rank from noise."""


@click.command("top")
@scope_options
@socket_option
@json_option
def command(run: str, job: str, fleet: bool, socket: str | None, as_json: bool) -> None:
    """Show runs, ranks, the node's GPUs and the verdict, twice a second, until q or Ctrl-C.

    Off a terminal and with --json, one frame is printed.
    With --fleet or --job, the ranks of all nodes; daemons that do not answer are named (exit code 5).
    """
    console = Console()
    scope = Scope(run, job, fleet)
    with connect(socket) as daemon:
        scope = scope.whole(daemon)
        frame = _ask(daemon, scope)
    if as_json or not console.is_terminal:
        if as_json:
            click.echo(json.dumps(_document(frame)))
        else:
            console.print(draw(replace(frame, problem="")))
        if frame.problem:
            raise PartialResultError(frame.problem)
        return
    try:
        with Keys() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
            _follow(frame, scope, socket, keys, live)
    except KeyboardInterrupt:
        return


def _follow(frame: Frame, scope: Scope, socket: str | None, keys: Keys, live: Live) -> None:
    """Refresh until q is pressed; wait for a daemon that has ended to restart."""
    while True:
        try:
            with connect(socket) as daemon:
                while True:
                    frame = _ask(daemon, scope)
                    live.update(draw(frame, live.console.height), refresh=True)
                    if keys.quit_within(_EVERY_S):
                        return
        except TorchperfdError as error:
            stale = replace(frame, problem=str(error), clock=_clock())
            live.update(draw(stale, live.console.height), refresh=True)
            if keys.quit_within(_EVERY_S):
                return


def _ask(daemon: Any, scope: Scope) -> Frame:
    node = daemon.GetInfo(control_pb2.GetInfoRequest(), timeout=_TIMEOUT_S).node
    steps = scope.steps(daemon, _NEWEST_STEPS)
    judged = scope.verdicts(daemon)
    wanted = control_pb2.GetReadingsRequest(names=_node_view.READINGS)
    readings = daemon.GetReadings(wanted, timeout=_TIMEOUT_S).readings
    return Frame(
        node=node,
        clock=_clock(),
        view=_node_view.node(readings),
        runs=_view.runs(steps.ranks),
        verdicts={each.run: each for each in judged.verdicts},
        nodes=len(steps.nodes),
        problem=missing(steps) or missing(judged),
    )


def _document(frame: Frame) -> dict[str, Any]:
    return {
        "schema": "torchperfd.top/1",
        "node": {"name": frame.node, **asdict(frame.view)},
        "runs": [
            {
                **_view.run_dict(run),
                "verdict": verdict_dict(frame.verdicts[run.run]) if run.run in frame.verdicts else None,
            }
            for run in frame.runs
        ],
    }


def _clock() -> str:
    return time.strftime("%H:%M:%S")
