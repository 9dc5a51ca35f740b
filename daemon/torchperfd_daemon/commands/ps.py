"""``torchperfd ps``."""

import json
import time
from typing import Any

import click

from torchperfd.v1 import control_pb2, session_pb2
from torchperfd_daemon.commands._daemon import connect
from torchperfd_daemon.commands._options import json_option, socket_option


@click.command("ps")
@socket_option
@json_option
def command(socket: str | None, as_json: bool) -> None:
    """List the runs on this node and what each rank is doing."""
    with connect(socket) as daemon:
        info = daemon.GetInfo(control_pb2.GetInfoRequest(), timeout=10)
        runs = daemon.ListRuns(control_pb2.ListRunsRequest(), timeout=10).runs
    if as_json:
        document = {
            "schema": "torchperfd.ps/1",
            "node": info.node,
            "metrics_url": info.metrics_url,
            "captures_dir": info.captures_dir,
            "runs": [_run_dict(run) for run in runs],
        }
        click.echo(json.dumps(document))
        return
    if not runs:
        click.echo("no runs; start one with `torchperfd run train.py`", err=True)
        return
    row = "{:<28.28} {:>5} {:>8} {:<13} {:>9} {:>10} {:>7}  {}"
    click.echo(row.format("RUN", "RANK", "PID", "STATE", "STEPS", "STEP", "DATA", "LAST STEP"))
    for run in runs:
        for rank in run.ranks:
            click.echo(row.format(run.run, *_cells(rank)))


def _run_dict(run: control_pb2.Run) -> dict[str, Any]:
    return {
        "run": run.run,
        "job_name": run.job_name,
        "world_size": run.world_size,
        "ranks": [
            {
                "rank": rank.identity.rank,
                "local_rank": rank.identity.local_rank,
                "node": rank.identity.node,
                "pid": rank.identity.pid,
                "script": rank.identity.script,
                "state": _state(rank),
                "connected": rank.connected,
                "steps": rank.steps,
                "step_seconds": rank.step_seconds,
                "phase_seconds": dict(rank.phase_seconds),
                "last_step_unix_seconds": rank.last_step_unix_seconds or None,
                "dropped_steps": rank.dropped_steps,
            }
            for rank in run.ranks
        ],
    }


def _cells(rank: control_pb2.RankStatus) -> list[str]:
    data = rank.phase_seconds.get("data", 0.0)
    last = rank.last_step_unix_seconds
    return [
        str(rank.identity.rank),
        str(rank.identity.pid),
        _state(rank) if rank.connected else "gone",
        str(rank.steps),
        f"{rank.step_seconds * 1e3:.2f} ms" if rank.step_seconds else "-",
        f"{data / rank.step_seconds:.1%}" if rank.step_seconds else "-",
        f"{max(0.0, time.time() - last):.0f} s ago" if last else "never",
    ]


def _state(rank: control_pb2.RankStatus) -> str:
    return session_pb2.RunState.Name(rank.state).removeprefix("RUN_STATE_").lower()
