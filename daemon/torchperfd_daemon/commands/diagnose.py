"""``torchperfd diagnose``."""

import json
from typing import Any, Final

import click

from torchperfd.v1 import control_pb2
from torchperfd_daemon.commands import _table
from torchperfd_daemon.commands._daemon import connect
from torchperfd_daemon.commands._options import json_option, socket_option
from torchperfd_daemon.commands._watch import show, watch_option

_TIMEOUT_S: Final = 10.0


@click.command("diagnose")
@click.option("--run", default="", help="Which run; all by default.")
@watch_option
@socket_option
@json_option
def command(run: str, watch: bool, socket: str | None, as_json: bool) -> None:
    """Say why each run is slow: the cause, where it is, the evidence, its cost, and what to type next."""
    with connect(socket) as daemon:

        def frame() -> str:
            names = [run] if run else [each.run for each in _runs(daemon)]
            verdicts = [
                daemon.GetRun(control_pb2.GetRunRequest(run=name), timeout=_TIMEOUT_S).verdict
                for name in names
            ]
            if as_json:
                told = [_dict(each) for each in verdicts]
                return json.dumps({"schema": "torchperfd.diagnosis/1", "verdicts": told})
            return "\n\n".join(map(text, verdicts))

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


def _runs(daemon: Any) -> Any:
    return daemon.ListRuns(control_pb2.ListRunsRequest(), timeout=_TIMEOUT_S).runs


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
