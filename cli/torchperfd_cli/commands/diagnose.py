"""``torchperfd diagnose``."""

import json
import sys

import click

from torchperfd.model import terminal_text
from torchperfd.model.card import card_of
from torchperfd.model.verdict_document import verdict_to_document
from torchperfd.v1 import control_pb2
from torchperfd_cli.commands._daemon import connect
from torchperfd_cli.commands._options import json_option, socket_option
from torchperfd_cli.commands._output import show, watch_option
from torchperfd_cli.commands._scope import Scope, missing, scope_options
from torchperfd_daemon.views.fleet import fleet_dict


@click.command("diagnose")
@scope_options
@watch_option
@socket_option
@json_option
def command(run: str, job: str, fleet: bool, watch: bool, socket: str | None, as_json: bool) -> None:
    """Explain why each run is slow: each cause with its cost, the evidence, a fix and the next command.

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
                    "verdicts": [verdict_to_document(each) for each in answer.verdicts],
                    **fleet_dict(answer),
                }
                return json.dumps({"schema": "torchperfd.diagnosis/1", **document}), missing(answer)
            colour, width = terminal_text.wants_colour(sys.stdout), terminal_text.width_of(sys.stdout)
            cards = [text(each, colour=colour, width=width) for each in answer.verdicts]
            return "\n\n".join(cards), missing(answer)

        show(frame, watch=watch, as_json=as_json)


def text(verdict: control_pb2.Verdict, *, colour: bool = False, width: int = 80) -> str:
    """Return the card of a verdict, below the name of its run."""
    run = terminal_text.paint(f"run {verdict.run}", "bold", colour=colour)
    return f"{run}\n{card_of(verdict).to_text(colour=colour, width=width)}"
