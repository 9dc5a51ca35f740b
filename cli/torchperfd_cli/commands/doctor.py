"""``torchperfd doctor``."""

import io
import json
from dataclasses import replace

import click

from torchperfd.v1 import control_pb2
from torchperfd_cli.commands._daemon import connect
from torchperfd_cli.commands._options import json_option, socket_option
from torchperfd_cli.commands._output import again, folded_text, watch_option
from torchperfd_daemon import doctor
from torchperfd_daemon.collectors.process import RankProcess
from torchperfd_daemon.errors import DaemonUnreachableError
from torchperfd_daemon.service.translate_account import loader_facts_from_message, thread_count


@click.command("doctor")
@watch_option
@socket_option
@json_option
def command(watch: bool, socket: str | None, as_json: bool) -> int:
    """Find what keeps this node's GPUs, CPUs and loaders from full speed.

    Each line names a finding, why it matters, and the command that fixes it. Nothing is
    changed. Exits with 0 when nothing was found, with 1 otherwise; with --watch, by the last
    answer.
    """
    found = 0

    def once() -> None:
        nonlocal found
        found = _print(socket, as_json=as_json)

    again(once, watch=watch, as_json=as_json)
    return 1 if found else 0


def _print(socket: str | None, *, as_json: bool) -> int:
    """Print the findings; return how many there are."""
    ranks, simulated = _ranks(socket)
    facts = doctor.read_facts(ranks)
    if simulated:
        skipped = {**facts.skipped, "ranks": "they are simulated (`torchperfd serve --demo`)"}
        facts = replace(facts, skipped=skipped)
    findings = doctor.examine(facts)
    if as_json:
        click.echo(json.dumps(doctor.to_dict(findings, facts.skipped)))
    else:
        text = io.StringIO()
        doctor.render_text(findings, facts.skipped, text)
        click.echo(folded_text(text.getvalue()), nl=False)
    return len(findings)


def _ranks(socket: str | None) -> tuple[dict[RankProcess, doctor.ReportedFacts] | None, bool]:
    """Return the connected ranks, None when no daemon answers; and whether some are simulated."""
    try:
        with connect(socket) as daemon:
            runs = daemon.ListRuns(control_pb2.ListRunsRequest(), timeout=10).runs
    except DaemonUnreachableError:
        return None, False
    connected = [rank for run in runs for rank in run.ranks if rank.connected]
    real = [rank for rank in connected if rank.identity.pid]
    found = {
        RankProcess(
            rank.identity.run,
            rank.identity.rank,
            rank.identity.pid,
            rank.identity.pid_namespace,
            rank.identity.process_start_ticks,
            uid=rank.uid if rank.HasField("uid") else None,
        ): doctor.ReportedFacts(
            loader_facts_from_message(rank.loader) if rank.HasField("loader") else None,
            thread_count(rank.threads),
        )
        for rank in real
    }
    return found, len(real) < len(connected)
