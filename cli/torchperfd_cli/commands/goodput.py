"""``torchperfd goodput``."""

import io
import json
from typing import Final

import click

from torchperfd.v1 import control_pb2
from torchperfd_cli.commands._daemon import connect
from torchperfd_cli.commands._options import json_option, socket_option
from torchperfd_cli.commands._output import NO_RUNS, again, folded_text, watch_option
from torchperfd_cli.commands._scope import known_name
from torchperfd_cli.commands.completion import complete_past_runs
from torchperfd_daemon.errors import NoSuchTargetError
from torchperfd_daemon.goodput.report import render_text, to_dict
from torchperfd_daemon.service import translate_account

_TIMEOUT_S: Final = 10.0


@click.command("goodput")
@click.option(
    "--run",
    default="",
    shell_complete=complete_past_runs,
    help="Which run; all by default, the newest first.",
)
@watch_option
@socket_option
@json_option
def command(run: str, watch: bool, socket: str | None, as_json: bool) -> None:
    """Show how every rank-second of a run was spent, across its restarts.

    Also covers runs that have ended: the node's daemon keeps them for 90 days.
    """
    again(lambda: _print(run, socket, as_json=as_json), watch=watch, as_json=as_json)


def _print(run: str, socket: str | None, *, as_json: bool) -> None:
    with connect(socket) as daemon:
        if run:
            # Runs that have ended are known to the goodput store only.
            every = daemon.GetGoodput(control_pb2.GetGoodputRequest(), timeout=_TIMEOUT_S)
            run = known_name(run, (each.run for each in every.runs), "run")
        answer = daemon.GetGoodput(control_pb2.GetGoodputRequest(run=run), timeout=_TIMEOUT_S)
    runs = [translate_account.run_goodput_from_message(message) for message in answer.runs]
    if run and not runs:
        raise NoSuchTargetError(
            f"there is no run {run} on this node", "`torchperfd goodput` lists those there are"
        )
    if as_json:
        click.echo(json.dumps(to_dict(runs)))
    elif runs:
        text = io.StringIO()
        render_text(runs, text)
        click.echo(folded_text(text.getvalue()), nl=False)
    else:
        click.echo(NO_RUNS, err=True)
