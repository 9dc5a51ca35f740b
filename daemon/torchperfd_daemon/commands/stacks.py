"""``torchperfd stacks``."""

import json
import sys
from collections.abc import Sequence

import click

from torchperfd.v1 import control_pb2
from torchperfd_daemon.commands._daemon import connect
from torchperfd_daemon.commands._options import Seconds, json_option, socket_option
from torchperfd_daemon.commands.capture import parse_ranks
from torchperfd_daemon.errors import PartialResultError, TorchperfdError
from torchperfd_daemon.service import translate_stacks
from torchperfd_daemon.stacks import RankStacks, merge
from torchperfd_daemon.stacks.report import ranks_text, render_text, to_dict

_MOST_RANKS = 100_000


@click.command("stacks")
@click.option("--run", default="", help="Which run; may be left out when there is only one.")
@click.option("--ranks", default="", metavar="0,8-15", help="Which ranks; all by default.")
@click.option(
    "--timeout",
    type=Seconds(0.1, 600),
    default=5.0,
    show_default=True,
    help="Seconds to wait for any rank.",
)
@socket_option
@json_option
def command(run: str, ranks: str, timeout: float, socket: str | None, as_json: bool) -> None:
    """Say where every thread of every rank is, also while ranks hang.

    Ranks with the same stack are shown once, and the ranks that the others wait for are named.
    """
    wanted = parse_ranks(ranks)
    request = control_pb2.StacksRequest(run=run, ranks=wanted, timeout_seconds=timeout)
    told: list[RankStacks] = []
    with connect(socket) as daemon:
        # The daemon keeps the deadline; ours is only there in case it dies.
        for message in daemon.Stacks(request, timeout=timeout + 10):
            run = message.identity.run
            told.append(translate_stacks.rank_stacks(message))
    if not told:
        raise TorchperfdError("the daemon told of no rank", "look into its log")
    told.sort(key=lambda rank: rank.rank)
    absent = [] if wanted else _absent(told)
    merged = merge(told)
    if as_json:
        click.echo(json.dumps(to_dict(run, told, merged, absent)))
    else:
        render_text(run, told, merged, sys.stdout)
    problems = [f"rank {rank.rank} has no stacks: {rank.outcome.value}" for rank in merged.untold]
    if absent:
        problems.append(f"ranks {ranks_text(absent)} are not here: on other nodes, or gone for a minute")
    if problems:
        raise PartialResultError("; ".join(problems))


def _absent(told: Sequence[RankStacks]) -> list[int]:
    """Return the ranks of the run that this node knows nothing of."""
    world = min(max(rank.world_size for rank in told), _MOST_RANKS)
    here = {rank.rank for rank in told}
    return [rank for rank in range(world) if rank not in here]
