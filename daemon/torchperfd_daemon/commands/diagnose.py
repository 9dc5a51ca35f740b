"""``torchperfd diagnose``."""

import json
from typing import Any

import click

from torchperfd.v1 import control_pb2
from torchperfd_daemon.commands import _table
from torchperfd_daemon.commands._daemon import connect
from torchperfd_daemon.commands._options import json_option, socket_option
from torchperfd_daemon.commands._scope import Scope, fleet_dict, missing, scope_options
from torchperfd_daemon.commands._watch import show, watch_option


@click.command("diagnose")
@scope_options
@watch_option
@socket_option
@json_option
def command(run: str, job: str, fleet: bool, watch: bool, socket: str | None, as_json: bool) -> None:
    """Say why each run is slow: the cause, where it is, the evidence, its cost, and what to type next.

    With --fleet or --job, one verdict on the ranks of all nodes; daemons that do not answer are named
    (exit code 5).
    """
    scope = Scope(run, job, fleet)
    with connect(socket) as daemon:

        def frame() -> tuple[str, str]:
            answer = scope.verdicts(daemon)
            if as_json:
                told = {"verdicts": [_dict(each) for each in answer.verdicts], **fleet_dict(answer)}
                return json.dumps({"schema": "torchperfd.diagnosis/1", **told}), missing(answer)
            return "\n\n".join(map(text, answer.verdicts)), missing(answer)

        show(frame, watch=watch, as_json=as_json)


def text(verdict: control_pb2.Verdict) -> str:
    """Return a verdict as people read it, one part a line."""
    cost = verdict.cost_seconds_per_step
    parts = [
        ("cause", verdict.cause),
        ("where", where(verdict)),
        ("evidence", verdict.evidence),
        ("cost", f"{_table.duration(cost)} of each step" if cost else "nothing"),
        ("next", verdict.next_command),
    ]
    return "\n".join([f"run {verdict.run}", *(f"  {name:<8}  {words}" for name, words in parts if words)])


def where(verdict: control_pb2.Verdict) -> str:
    """Return the rank, node and phase that a verdict is about."""
    rank = f"rank {verdict.rank} on {verdict.node}" if verdict.rank >= 0 else "all ranks alike"
    return f"{rank}, {verdict.phase}" if verdict.phase else rank


def _dict(verdict: control_pb2.Verdict) -> dict[str, Any]:
    return {
        "run": verdict.run,
        "cause": verdict.cause,
        "node": verdict.node or None,
        "rank": verdict.rank if verdict.rank >= 0 else None,
        "phase": verdict.phase or None,
        "evidence": verdict.evidence,
        "cost_seconds_per_step": verdict.cost_seconds_per_step,
        "next_command": verdict.next_command,
        "summary": verdict.summary,
    }
