"""``torchperfd doctor``: what keeps this node from full speed, or its daemon from seeing what it should."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeAlias

import click

from torchperfd.model.messages import unpack
from torchperfd.model.totals import StatusTotals
from torchperfd.v1 import control_pb2
from torchperfd_cli.commands._daemon import connect, find_daemon
from torchperfd_cli.commands._output import Answer, live
from torchperfd_daemon import doctor
from torchperfd_daemon.collectors.process import RankProcess
from torchperfd_daemon.errors import DaemonUnreachableError, explained


@click.command("doctor")
@click.option("--daemon", "of_daemon", is_flag=True, help="Examine the daemon that runs, not the node.")
@live
def doctor_command(of_daemon: bool, socket: str | None, as_json: bool) -> Answer:
    """Find what keeps this node's GPUs, CPUs and loaders from full speed.

    With --daemon, find what keeps the daemon from seeing, keeping or sharing what it should.

    Each line names a finding, why it matters, and the command that fixes it. Nothing is
    changed. Exits with 0 when nothing was found, with 1 otherwise; with --watch, by the last
    answer.
    """
    findings, skipped = (_daemon_findings if of_daemon else _node_findings)(socket)
    return Answer(
        (doctor.to_dict if as_json else doctor.findings_document)(findings, skipped),
        exit_code=1 if findings else 0,
    )


_Findings: TypeAlias = tuple[list[doctor.Finding], Mapping[str, str]]
"""The findings, and what was not examined, with the reasons."""


def _node_findings(socket: str | None) -> _Findings:
    ranks, simulated = _ranks(socket)
    facts = doctor.read_facts(ranks)
    if simulated:
        skipped = {**facts.skipped, "ranks": "they are simulated (`torchperfd serve --demo`)"}
        facts = replace(facts, skipped=skipped)
    return doctor.examine(facts), facts.skipped


def _daemon_findings(socket: str | None) -> _Findings:
    from torchperfd_daemon.doctor.running_daemon import examine_daemon, read_daemon
    from torchperfd_daemon.web.access import token_path

    path, info = find_daemon(socket)
    with explained(f"the daemon at {path} has ended"):
        facts = read_daemon(path, info, str(token_path(path)))
    return examine_daemon(facts), facts.skipped


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
        ): doctor.ReportedFacts(totals.loader, totals.threads)
        for rank in real
        for totals in (unpack(rank, StatusTotals),)
    }
    return found, len(real) < len(connected)
