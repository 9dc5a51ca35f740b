"""``torchperfd steps``: the newest steps of a rank."""

import time
from collections.abc import Sequence

import click
import numpy as np

from torchperfd.document.blocks import Document, FirstThatFits
from torchperfd.document.tables import Table
from torchperfd.model.formatting import milliseconds
from torchperfd.v1 import control_pb2
from torchperfd_cli.commands._daemon import connect
from torchperfd_cli.commands._options import complete_runs
from torchperfd_cli.commands._output import Answer, fitted_phases, live
from torchperfd_cli.commands._scope import Scope, last_option
from torchperfd_daemon.errors import NoSuchTargetError
from torchperfd_daemon.service.translate_work import rank_work_from_message
from torchperfd_daemon.views import live as _view
from torchperfd_daemon.views.live import steps_dict
from torchperfd_daemon.views.model import WAIT


@click.command("steps")
@click.option("--rank", type=click.IntRange(0), required=True, help="Which rank.")
@click.option(
    "--run",
    default="",
    shell_complete=complete_runs,
    help="The run; may be omitted when only one has such a rank.",
)
@last_option(20)
@live
def steps_command(rank: int, run: str, last: int, socket: str | None, as_json: bool) -> Answer:
    """List a rank's newest training steps, oldest first, with the milliseconds of each phase."""
    with connect(socket) as daemon:
        ranks = Scope(run).whole(daemon).steps(daemon, last, [rank]).ranks
    if len(ranks) > 1:
        names = ", ".join(each.status.identity.run for each in ranks)
        raise NoSuchTargetError(f"{len(ranks)} runs have a rank {rank}: {names}", "choose one with --run")
    [steps] = ranks
    if as_json:
        return Answer(steps_dict(steps))
    if not steps.count:
        return Answer(notes=[f"rank {rank} has made no training step yet"])
    return Answer(Document([[steps_table(steps, time.time())]]))


def steps_table(steps: control_pb2.RankSteps, now: float) -> FirstThatFits:
    """Return a rank's steps as a table, times in milliseconds on the host.

    Args:
        now: Unix seconds.
    """
    # Times on the device are means of many steps.
    del steps.device_phases[:]
    [view] = _view.runs([steps])
    work = rank_work_from_message(steps)
    columns = work.phase_seconds
    phases = [*view.phases, *([WAIT] if _view.spent(work, WAIT) else [])]
    ends = np.frombuffer(steps.end_ns, "<i8") / 1e9
    durations = np.frombuffer(steps.duration_ns, "<i8") / 1e9
    sizes = {name: float(columns[name].mean()) for name in phases}

    def made(own: Sequence[str], summed: Sequence[str]) -> Table:
        heads = ["STEP", "ENDED", "MS", *("WAIT" if name == WAIT else name.upper() for name in own)]
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
        return Table([*heads, *(["REST"] if summed else [])], rows)

    return fitted_phases(phases, sizes, made)
