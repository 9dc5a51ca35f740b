"""``torchperfd goodput``: how every rank-second of runs was spent."""

from typing import Final

import click

from torchperfd.v1 import control_pb2
from torchperfd_cli.commands._daemon import connect
from torchperfd_cli.commands._options import complete_past_runs, fleet_option
from torchperfd_cli.commands._output import Answer, live
from torchperfd_cli.commands._scope import known_name
from torchperfd_cli.commands._series import SeriesOptions, series_options
from torchperfd_daemon.errors import NoSuchTargetError
from torchperfd_daemon.goodput.totals import RunGoodput
from torchperfd_daemon.service import translate_diagnosis
from torchperfd_daemon.views.documents import (
    goodput_document,
    nodes_document,
    nodes_to_dict,
    to_dict,
)

_GOODPUT_TIMEOUT_S: Final = 10.0


@click.command("goodput")
@click.option(
    "--run",
    default="",
    shell_complete=complete_past_runs,
    help="Which run; all by default, the newest first.",
)
@click.option(
    "--lake", "url", metavar="URL", help="Ask the lake instead of this node's daemon; docs/history.md."
)
@fleet_option
@series_options
@live
def goodput_command(
    run: str, url: str | None, fleet: bool, series: SeriesOptions, socket: str | None, as_json: bool
) -> Answer:
    """Show how every rank-second of a run was spent, across its restarts.

    Also covers runs that have ended: the node's daemon keeps them for 90 days.
    With --prometheus, or --fleet where that is configured, runs of all nodes that go on, by node.
    """
    if url is not None:
        runs = _from_lake(url, run)
        return Answer(to_dict(runs) if as_json else goodput_document(runs))
    if fleet or series.is_given:
        found = series.required_view().goodput(run)
        return Answer(nodes_to_dict(found) if as_json else nodes_document(found))
    with connect(socket) as daemon:
        if run:
            # Runs that have ended are known to the goodput store only.
            every = daemon.GetGoodput(control_pb2.GetGoodputRequest(), timeout=_GOODPUT_TIMEOUT_S)
            run = known_name(run, (each.run for each in every.runs), "run")
        answer = daemon.GetGoodput(control_pb2.GetGoodputRequest(run=run), timeout=_GOODPUT_TIMEOUT_S)
    runs = [translate_diagnosis.run_goodput_from_message(message) for message in answer.runs]
    if run and not runs:
        raise NoSuchTargetError(
            f"there is no run {run} on this node", "`torchperfd goodput` lists those there are"
        )
    return Answer(to_dict(runs) if as_json else goodput_document(runs))


def _from_lake(url: str, run: str) -> list[RunGoodput]:
    # duckdb is loaded by this alone.
    from torchperfd_cli.commands.history import goodput_of_lake, open_lake

    with open_lake(url, None) as lake:
        runs = goodput_of_lake(lake, run)
    if run and not runs:
        raise NoSuchTargetError(
            f"the lake has no run {run} in a week", "`torchperfd history recent_runs` lists runs"
        )
    return runs
