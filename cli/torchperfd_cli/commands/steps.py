"""``torchperfd steps``."""

import json
import time
from collections.abc import Sequence

import click
import numpy as np

from torchperfd.model.formatting import milliseconds
from torchperfd.v1 import control_pb2
from torchperfd_cli.commands._daemon import connect
from torchperfd_cli.commands._options import json_option, socket_option
from torchperfd_cli.commands._output import Rows, again, fitted_phases, watch_option
from torchperfd_cli.commands._scope import Scope, last_option
from torchperfd_cli.commands.completion import complete_runs
from torchperfd_daemon.errors import NoSuchTargetError
from torchperfd_daemon.service.translate import rank_work_from_message
from torchperfd_daemon.views import live as _view
from torchperfd_daemon.views.live import steps_dict


@click.command("steps")
@click.option("--rank", type=click.IntRange(0), required=True, help="Which rank.")
@click.option(
    "--run",
    default="",
    shell_complete=complete_runs,
    help="The run; may be omitted when only one has such a rank.",
)
@last_option(20)
@watch_option
@socket_option
@json_option
def command(rank: int, run: str, last: int, watch: bool, socket: str | None, as_json: bool) -> None:
    """List a rank's newest training steps, oldest first, with the milliseconds of each phase."""
    again(lambda: _print(rank, run, last, socket, as_json=as_json), watch=watch, as_json=as_json)


def _print(rank: int, run: str, last: int, socket: str | None, *, as_json: bool) -> None:
    with connect(socket) as daemon:
        ranks = Scope(run).whole(daemon).steps(daemon, last, [rank]).ranks
    if len(ranks) > 1:
        names = ", ".join(each.status.identity.run for each in ranks)
        raise NoSuchTargetError(f"{len(ranks)} runs have a rank {rank}: {names}", "choose one with --run")
    [steps] = ranks
    if as_json:
        click.echo(json.dumps(steps_dict(steps)))
    elif steps.count:
        click.echo("\n".join(lines(steps, time.time())))
    else:
        click.echo(f"rank {rank} has made no training step yet", err=True)


def lines(steps: control_pb2.RankSteps, now: float) -> list[str]:
    """Return a rank's steps as a table, times in milliseconds on the host.

    Args:
        now: Unix seconds.
    """
    # Times on the device are means of many steps.
    del steps.device_phases[:]
    [view] = _view.runs([steps])
    work = rank_work_from_message(steps)
    columns = work.phase_seconds
    phases = [*view.phases, *([_view.WAIT] if _view.spent(work, _view.WAIT) else [])]
    ends = np.frombuffer(steps.end_ns, "<i8") / 1e9
    durations = np.frombuffer(steps.duration_ns, "<i8") / 1e9
    sizes = {name: float(columns[name].mean()) for name in phases}

    def drawn(own: Sequence[str], summed: Sequence[str]) -> Rows:
        heads = ["STEP", "ENDED", "MS", *("WAIT" if name == _view.WAIT else name.upper() for name in own)]
        rows = [
            [
                str(steps.first_step + position),
                f"{max(0.0, now - ends[position]):.1f} s ago",
                milliseconds(durations[position]),
                *(milliseconds(columns[name][position]) for name in own),
                *([milliseconds(sum(columns[name][position] for name in summed))] if summed else []),
            ]
            for position in range(steps.count)
        ]
        return [*heads, *(["REST"] if summed else [])], rows

    return fitted_phases(phases, sizes, drawn)
