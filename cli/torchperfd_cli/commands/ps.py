"""``torchperfd ps``: the runs that the daemon knows."""

import time
from collections.abc import Sequence
from typing import Final

import click

from torchperfd.document.blocks import Document
from torchperfd.document.tables import Table
from torchperfd.v1 import control_pb2
from torchperfd_cli.commands._daemon import connect
from torchperfd_cli.commands._options import fleet_option
from torchperfd_cli.commands._output import Answer, live
from torchperfd_cli.commands._scope import Scope, job_option, missing
from torchperfd_daemon.views.documents import (
    builds_text,
    fleet_dict,
)
from torchperfd_daemon.views.live import run_status_dict
from torchperfd_daemon.views.model import rank_state

_PS_TIMEOUT_S: Final = 10.0
_RANK_HEADS: Final = ("RANK", "PID", "STATE", "STEPS", "STEP", "DATA", "LAST STEP")


def ranks_table(runs: Sequence[control_pb2.Run], *, with_node: bool) -> Table:
    """Return the ranks of runs, one a row."""
    heads = [*(["NODE"] if with_node else []), "RUN", *_RANK_HEADS]
    rows = [
        [*([rank.identity.node] if with_node else []), run.run, *_rank_cells(rank)]
        for run in runs
        for rank in run.ranks
    ]
    return Table(heads, rows, left=("NODE", "RUN", "STATE", "LAST STEP"), lift=("RUN", "NODE"))


@click.command("ps")
@job_option
@fleet_option
@live
def ps_command(job: str, fleet: bool, socket: str | None, as_json: bool) -> Answer:
    """List the runs on this node and what each rank is doing.

    With --fleet or --job, those on all nodes; daemons that do not answer are named (exit code 5).
    """
    with connect(socket) as daemon:
        info = daemon.GetInfo(control_pb2.GetInfoRequest(), timeout=_PS_TIMEOUT_S)
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
        return Answer(document, missing=missing(listed))
    table = [[ranks_table(listed.runs, with_node=bool(listed.nodes))]] if listed.runs else []
    builds = builds_text(listed.nodes)
    return Answer(Document(table), [builds] * bool(builds), missing(listed))


def _rank_cells(rank: control_pb2.RankStatus) -> list[str]:
    data = rank.phase_seconds.get("data", 0.0)
    last = rank.last_step_unix_seconds
    return [
        str(rank.identity.rank),
        str(rank.identity.pid),
        rank_state(rank),
        str(rank.steps),
        f"{rank.step_seconds * 1e3:.2f} ms" if rank.step_seconds else "-",
        f"{data / rank.step_seconds:.1%}" if rank.step_seconds else "-",
        f"{max(0.0, time.time() - last):.0f} s ago" if last else "never",
    ]
