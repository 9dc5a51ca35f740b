"""``torchperfd ps``."""

import json
import time
from collections.abc import Sequence
from typing import Final

import click

from torchperfd.v1 import control_pb2
from torchperfd_cli.commands._daemon import connect
from torchperfd_cli.commands._options import fleet_option, json_option, socket_option
from torchperfd_cli.commands._output import NO_RUNS, again, fitted, watch_option
from torchperfd_cli.commands._scope import Scope, job_option, missing
from torchperfd_daemon.errors import PartialResultError
from torchperfd_daemon.views import live as _view
from torchperfd_daemon.views.fleet import builds_text, fleet_dict
from torchperfd_daemon.views.live import run_status_dict

_TIMEOUT_S: Final = 10.0
_HEADS: Final = ("RANK", "PID", "STATE", "STEPS", "STEP", "DATA", "LAST STEP")


@click.command("ps")
@job_option
@fleet_option
@watch_option
@socket_option
@json_option
def command(job: str, fleet: bool, watch: bool, socket: str | None, as_json: bool) -> None:
    """List the runs on this node and what each rank is doing.

    With --fleet or --job, those on all nodes; daemons that do not answer are named (exit code 5).
    """
    again(lambda: _print(job, fleet, socket, as_json=as_json), watch=watch, as_json=as_json)


def _print(job: str, fleet: bool, socket: str | None, *, as_json: bool) -> None:
    with connect(socket) as daemon:
        info = daemon.GetInfo(control_pb2.GetInfoRequest(), timeout=_TIMEOUT_S)
        listed = Scope(job=job, fleet=fleet).runs(daemon)
    if as_json:
        document = {
            "schema": "torchperfd.ps/1",
            "node": info.node,
            "metrics_url": info.metrics_url,
            "captures_dir": info.captures_dir,
            "runs": [run_status_dict(run) for run in listed.runs],
            **fleet_dict(listed),
        }
        click.echo(json.dumps(document))
    elif listed.runs:
        print_table(listed.runs, with_node=bool(listed.nodes))
    else:
        click.echo(NO_RUNS, err=True)
    if not as_json and (builds := builds_text(listed.nodes)):
        click.echo(builds, err=True)
    if silent := missing(listed):
        raise PartialResultError(silent)


def print_table(runs: Sequence[control_pb2.Run], *, with_node: bool) -> None:
    """Print the ranks of runs, one a row."""
    heads = [*(["NODE"] if with_node else []), "RUN", *_HEADS]
    rows = [
        [*([rank.identity.node] if with_node else []), run.run, *_cells(rank)]
        for run in runs
        for rank in run.ranks
    ]
    table = fitted(heads, rows, left=("NODE", "RUN", "STATE", "LAST STEP"), lift=("RUN", "NODE"))
    click.echo("\n".join(table))


def _cells(rank: control_pb2.RankStatus) -> list[str]:
    data = rank.phase_seconds.get("data", 0.0)
    last = rank.last_step_unix_seconds
    return [
        str(rank.identity.rank),
        str(rank.identity.pid),
        _view.rank_state(rank),
        str(rank.steps),
        f"{rank.step_seconds * 1e3:.2f} ms" if rank.step_seconds else "-",
        f"{data / rank.step_seconds:.1%}" if rank.step_seconds else "-",
        f"{max(0.0, time.time() - last):.0f} s ago" if last else "never",
    ]
