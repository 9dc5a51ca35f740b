"""``torchperfd diagnose``."""

import json

import click

from torchperfd.durations import duration
from torchperfd.v1 import control_pb2
from torchperfd_daemon.commands._daemon import connect
from torchperfd_daemon.commands._options import json_option, socket_option
from torchperfd_daemon.commands._scope import Scope, missing, scope_options
from torchperfd_daemon.commands._watch import show, watch_option
from torchperfd_daemon.diagnosis import Cause
from torchperfd_daemon.views.fleet import fleet_dict
from torchperfd_daemon.views.verdicts import verdict_dict


@click.command("diagnose")
@scope_options
@watch_option
@socket_option
@json_option
def command(run: str, job: str, fleet: bool, watch: bool, socket: str | None, as_json: bool) -> None:
    """Explain why each run is slow: the cause, where it is, the evidence, its cost, and the next command.

    With --fleet or --job, one verdict on the ranks of all nodes; daemons that do not answer are named
    (exit code 5).
    """
    scope = Scope(run, job, fleet)
    with connect(socket) as daemon:
        scope = scope.whole(daemon)

        def frame() -> tuple[str, str]:
            answer = scope.verdicts(daemon)
            if as_json:
                document = {
                    "verdicts": [verdict_dict(each) for each in answer.verdicts],
                    **fleet_dict(answer),
                }
                return json.dumps({"schema": "torchperfd.diagnosis/1", **document}), missing(answer)
            return "\n\n".join(map(text, answer.verdicts)), missing(answer)

        show(frame, watch=watch, as_json=as_json)


def text(verdict: control_pb2.Verdict) -> str:
    """Return a verdict as text, one part per line."""
    parts = [
        ("cause", verdict.cause),
        ("where", where(verdict)),
        ("evidence", verdict.evidence),
        ("window", f"last {verdict.window_seconds:.0f} s" if verdict.window_seconds >= 1 else ""),
        ("cost", _cost(verdict)),
        *(("also", _other(other)) for other in verdict.others),
        ("next", verdict.next_command),
    ]
    return "\n".join([f"run {verdict.run}", *(f"  {name:<8}  {words}" for name, words in parts if words)])


def where(verdict: control_pb2.Verdict) -> str:
    """Return the rank, node and phase that a verdict is about."""
    rank = f"rank {verdict.rank} on {verdict.node}" if verdict.rank >= 0 else "all ranks alike"
    return f"{rank}, {verdict.phase}" if verdict.phase else rank


def _cost(verdict: control_pb2.Verdict) -> str:
    if verdict.stalled_seconds:
        return f"all of it: no step for {verdict.stalled_seconds:.0f} s"
    if verdict.cost_seconds_per_step:
        return f"{duration(verdict.cost_seconds_per_step)} of each step"
    return "not known" if verdict.cause == Cause.UNKNOWN.value else "nothing"


def _other(verdict: control_pb2.Verdict) -> str:
    rank = f" · rank {verdict.rank} on {verdict.node}" if verdict.rank >= 0 else ""
    return f"{verdict.cause}{rank} · {verdict.evidence}"
