"""``torchperfd stacks``."""

import io
import json
from collections.abc import Sequence
from pathlib import Path

import click
from click.core import ParameterSource

from torchperfd.v1 import control_pb2
from torchperfd_cli.commands._daemon import connect, unreachable_text
from torchperfd_cli.commands._options import Seconds, complete_runs, fleet_option, json_option, socket_option
from torchperfd_cli.commands._output import again, folded_text, watch_option
from torchperfd_cli.commands._scope import whole_run
from torchperfd_cli.commands.capture import parse_ranks
from torchperfd_daemon.errors import PartialResultError, TorchperfdError, UsageError
from torchperfd_daemon.service import translate_diagnosis
from torchperfd_daemon.stacks import RankStacks, merge
from torchperfd_daemon.stacks import flight_recorder as dumps_report
from torchperfd_daemon.stacks.flight_recorder import judge
from torchperfd_daemon.stacks.flight_recorder_dumps import read_dumps
from torchperfd_daemon.stacks.report import render_text, to_dict
from torchperfd_daemon.text import ranks_phrase, ranks_text
from torchperfd_daemon.views.documents import absent_ranks, each_once


@click.command("stacks")
@click.option(
    "--run", default="", shell_complete=complete_runs, help="The run; may be omitted when there is only one."
)
@click.option("--ranks", default="", metavar="0,8-15", help="Which ranks; all by default.")
@click.option(
    "--timeout",
    type=Seconds(0.1, 600),
    default=5.0,
    show_default=True,
    help="Seconds to wait for any rank.",
)
@click.option(
    "--signal",
    is_flag=True,
    help="Send a signal to a rank that neither answers nor can be read by py-spy. This can crash the rank:"
    " two of three processes did not survive 2,000 signals. Not with --fleet.",
)
@click.option(
    "--from",
    "dumps",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="Flight Recorder dumps of a dead job: a directory of nccl_trace_rank_*, or files. Asks no daemon.",
)
@fleet_option
@watch_option
@socket_option
@json_option
def stacks_command(
    dumps: tuple[Path, ...],
    run: str,
    ranks: str,
    timeout: float,
    signal: bool,
    fleet: bool,
    watch: bool,
    socket: str | None,
    as_json: bool,
) -> None:
    """Show where every thread of every rank is, also while ranks hang.

    Ranks with the same stack are shown once, and the ranks that the others wait for are named.
    A rank that does not answer is read from outside by py-spy, if that is installed and permitted.
    With --fleet, the ranks on all nodes.

    With --from, name the ranks that the others waited for, by what torch's Flight Recorder has left of a job
    that is dead.
    """
    if dumps:
        _refuse_options_of_live_runs(click.get_current_context())
        _print_dumps(dumps, as_json=as_json)
        return
    if watch and signal:
        raise UsageError("--signal can crash a rank, so it is not repeated", "leave out --watch or --signal")
    request = control_pb2.StacksRequest(
        run=run, ranks=parse_ranks(ranks), timeout_seconds=timeout, allow_signal=signal, fleet=fleet
    )
    again(lambda: _print(request, socket, as_json=as_json), watch=watch, as_json=as_json)


def _print(request: control_pb2.StacksRequest, socket: str | None, *, as_json: bool) -> None:
    run, wanted, fleet = request.run, request.ranks, request.fleet
    answers: list[RankStacks] = []
    unreachable: list[control_pb2.UnreachablePeer] = []
    with connect(socket) as daemon:
        request.run = whole_run(daemon, run, fleet=fleet)
        # The daemon keeps the deadline; ours is only there in case it dies.
        for message in daemon.Stacks(request, timeout=request.timeout_seconds + 10):
            if message.HasField("unreachable"):
                unreachable.append(message.unreachable)
                continue
            run = message.identity.run
            answers.append(translate_diagnosis.rank_stacks_from_message(message))
    if not answers:
        raise TorchperfdError("the daemon reported no rank", "see its log")
    answers = each_once(answers)
    absent = absent_ranks(answers, wanted)
    merged = merge(answers)
    if as_json:
        click.echo(json.dumps(to_dict(run, answers, merged, absent)))
    else:
        text = io.StringIO()
        render_text(run, answers, merged, text)
        click.echo(folded_text(text.getvalue()), nl=False)
    problems = [f"rank {rank.rank} has no stacks: {rank.outcome.value}" for rank in merged.without_stacks]
    if absent:
        where = "on no node that answers" if fleet else "not here: on other nodes"
        problems.append(f"ranks {ranks_text(absent)} are {where}, or gone for a minute")
    if unreachable:
        problems.append(unreachable_text(unreachable))
    if problems:
        raise PartialResultError("; ".join(problems))


def _refuse_options_of_live_runs(context: click.Context) -> None:
    for parameter in context.command.params:
        is_given = context.get_parameter_source(parameter.name or "") is ParameterSource.COMMANDLINE
        if is_given and parameter.name not in ("dumps", "as_json"):
            raise UsageError(f"{parameter.opts[0]} is for live runs, not for dumps", "leave it out")


def _print_dumps(paths: Sequence[Path], *, as_json: bool) -> None:
    found = read_dumps(paths)
    verdict = judge(found.dumps)
    if as_json:
        click.echo(json.dumps(dumps_report.to_dict(found, verdict)))
    else:
        text = io.StringIO()
        dumps_report.render_text(found, verdict, text)
        click.echo(folded_text(text.getvalue()), nl=False)
    problems = [error for _, error in found.failed]
    if verdict.undumped:
        problems.append(f"there is no dump of {ranks_phrase(verdict.undumped)}")
    if problems:
        raise PartialResultError("; ".join(problems))
