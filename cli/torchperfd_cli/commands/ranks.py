"""``torchperfd ps``, ``ranks``, ``steps`` and ``goodput``: the numbers of runs that the daemon knows."""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import click
import numpy as np

from torchperfd.document.blocks import Document, FirstThatFits, Sentences
from torchperfd.document.tables import Table
from torchperfd.model.formatting import duration, milliseconds
from torchperfd.model.step_account import Account
from torchperfd.v1 import control_pb2
from torchperfd_cli.commands import _output
from torchperfd_cli.commands._daemon import connect
from torchperfd_cli.commands._options import complete_past_runs, complete_runs, fleet_option
from torchperfd_cli.commands._output import Answer, fitted_phases, live
from torchperfd_cli.commands._scope import Scope, job_option, known_name, last_option, missing, scope_options
from torchperfd_cli.commands._series import SeriesOptions, series_options
from torchperfd_daemon.diagnosis.detect.straggler import Straggler
from torchperfd_daemon.errors import NoSuchTargetError
from torchperfd_daemon.goodput.totals import RunGoodput
from torchperfd_daemon.service import translate_diagnosis
from torchperfd_daemon.service.translate import rank_work_from_message
from torchperfd_daemon.views import live as _view
from torchperfd_daemon.views.documents import (
    builds_text,
    fleet_dict,
    goodput_document,
    nodes_document,
    nodes_to_dict,
    to_dict,
)
from torchperfd_daemon.views.live import run_status_dict, steps_dict
from torchperfd_daemon.views.model import WAIT, RankView, RunView, behind_text, rank_state

_PS_TIMEOUT_S: Final = 10.0
_RANK_HEADS: Final = ("RANK", "PID", "STATE", "STEPS", "STEP", "DATA", "LAST STEP")


def ranks_table(runs: Sequence[control_pb2.Run], *, with_node: bool) -> Table:
    """Return the ranks of runs, one a row."""
    heads = [*(["NODE"] if with_node else []), "RUN", *_RANK_HEADS]
    rows = [
        [*([rank.identity.node] if with_node else []), run.run, *_rank_cells(rank)]
        for run in runs
        for rank in run.ranks
    ]
    return Table(heads, rows, left=("NODE", "RUN", "STATE", "LAST STEP"), lift=("RUN", "NODE"))


@click.command("ps")
@job_option
@fleet_option
@live
def ps_command(job: str, fleet: bool, socket: str | None, as_json: bool) -> Answer:
    """List the runs on this node and what each rank is doing.

    With --fleet or --job, those on all nodes; daemons that do not answer are named (exit code 5).
    """
    with connect(socket) as daemon:
        info = daemon.GetInfo(control_pb2.GetInfoRequest(), timeout=_PS_TIMEOUT_S)
        listed = Scope(job=job, fleet=fleet).runs(daemon)
    if as_json:
        document = {
            "schema": "torchperfd.ps/1",
            "node": info.node,
            "metrics_url": info.metrics_url,
            "captures_dir": info.captures_dir,
            "runs": [run_status_dict(run) for run in listed.runs],
            **fleet_dict(listed),
        }
        return Answer(document, missing=missing(listed))
    table = [[ranks_table(listed.runs, with_node=bool(listed.nodes))]] if listed.runs else []
    builds = builds_text(listed.nodes)
    return Answer(Document(table), [builds] * bool(builds), missing(listed))


def _rank_cells(rank: control_pb2.RankStatus) -> list[str]:
    data = rank.phase_seconds.get("data", 0.0)
    last = rank.last_step_unix_seconds
    return [
        str(rank.identity.rank),
        str(rank.identity.pid),
        rank_state(rank),
        str(rank.steps),
        f"{rank.step_seconds * 1e3:.2f} ms" if rank.step_seconds else "-",
        f"{data / rank.step_seconds:.1%}" if rank.step_seconds else "-",
        f"{max(0.0, time.time() - last):.0f} s ago" if last else "never",
    ]


_TRAINING: Final = "training"
_REST: Final = "REST"


@click.command("ranks")
@scope_options
@last_option(128)
@live
def ranks_command(
    run: str, job: str, fleet: bool, series: SeriesOptions, last: int, socket: str | None, as_json: bool
) -> Answer:
    """Show how each rank spends its steps, and which rank the others wait for.

    Times are means of the newest training steps; those on the devices where ranks wait for each other there,
    as with NCCL. VS PEERS compares a rank's own work, which is its step less the wait for others, with the
    median of the other ranks, and ◀ marks a slow rank. REST is the sum of the phases that the terminal has no
    room for. STATE is left out while all ranks train.
    With --fleet or --job, the ranks of all nodes; daemons that do not answer are named (exit code 5).
    With --prometheus, the same from series: means of ten seconds, whatever --last is.
    """
    scope = Scope(run, job, fleet, series)
    with scope.connect(socket) as daemon:
        scope = scope.whole(daemon)
        answer = scope.steps(daemon, last)
        runs = _view.runs(answer.ranks)
        accounts = _accounts(scope, daemon, runs)
    if as_json:
        shown = [
            {**_view.run_dict(each), "account": account.to_document() if account else None}
            for each in runs
            for account in [accounts.get(each.run)]
        ]
        document = {"schema": "torchperfd.ranks/1", "runs": shown, **fleet_dict(answer)}
        return Answer(document, missing=missing(answer))
    found = Document([])
    for each in runs:
        found += ranks_document(each, accounts.get(each.run), fleet=bool(answer.nodes))
    return Answer(found, missing=missing(answer))


def _accounts(scope: Scope, daemon: Any, runs: Sequence[RunView]) -> dict[str, Account | None]:
    """Ask for the accounts of runs; of a single rank they have nothing that its phases lack."""
    if all(len(run.ranks) < 2 for run in runs):
        return {}
    return {verdict.run: Account.from_verdict(verdict) for verdict in scope.verdicts(daemon).verdicts}


def ranks_document(view: RunView, account: Account | None = None, *, fleet: bool = False) -> Document:
    """Return a run's table and remarks, for the ranks of this node or of all nodes."""
    sizes = {name: max(rank.phase_seconds.get(name, 0.0) for rank in view.ranks) for name in view.phases}
    cells: Cells = {}
    table = fitted_phases(
        view.phases, sizes, lambda own, summed: _table_of(view, own, summed, cells, fleet=fleet)
    )
    waits = [account.words] if account is not None and len(view.ranks) > 1 else []
    return Document([[Sentences([_title(view, fleet=fleet)]), table, Sentences([*waits, *_remarks(view)])]])


def _title(view: RunView, *, fleet: bool) -> str:
    where = _output.count(len(view.nodes), "node") if fleet else "this node"
    step = f", a step takes {duration(view.step_seconds)}" if view.step_seconds else ""
    unit = "milliseconds per step" + (" on the devices" if view.on_device else "")
    return f"run {view.run}: {view.here} of {view.world_size} ranks on {where}{step}; {unit}"


Cells = dict[str, list[str]]
"""The cells of a run's table by the head of their column: tables of several widths have most of them."""


def _table_of(
    view: RunView, phases: Sequence[str], summed: Sequence[str], cells: Cells, *, fleet: bool
) -> Table:
    """Return the ranks, one a row, with one column for all phases that are summed up."""
    columns: dict[str, Callable[[RankView], str]] = {"RANK": lambda rank: str(rank.rank)}
    if any(rank.coordinates for rank in view.ranks):
        columns["PLACE"] = lambda rank: rank.coordinates or "-"
    if fleet or len(view.nodes) > 1:
        columns["NODE"] = lambda rank: rank.node
    if {rank.state for rank in view.ranks} != {_TRAINING}:
        columns["STATE"] = lambda rank: rank.state
    columns["STEPS"] = lambda rank: str(rank.steps)
    columns["STEP"] = lambda rank: milliseconds(rank.step_seconds) if rank.window else "-"
    for name in phases:
        columns[name.upper()] = functools.partial(_time, names=[name])
    if summed:
        cells.pop(_REST, None)
        columns[_REST] = functools.partial(_time, names=summed)
    if view.waits:
        columns["WAIT"] = functools.partial(_time, names=[WAIT])
    columns["VS PEERS"] = lambda rank: "-" if rank.behind_ratio is None else behind_text(rank.behind_ratio)
    if any(rank.host_memory for rank in view.ranks):
        columns["RSS / PEAK"] = lambda rank: rank.host_memory.cell if rank.host_memory else "-"
    columns[""] = lambda rank: "◀" if rank.slow else ""
    for head in columns.keys() - cells.keys():
        cells[head] = list(map(columns[head], view.ranks))
    rows = list(zip(*(cells[head] for head in columns), strict=True))
    return Table([*columns], rows, left=("PLACE", "NODE", "STATE", ""), lift=("NODE", "PLACE"))


def _time(rank: RankView, names: Sequence[str]) -> str:
    known = [rank.phase_seconds[name] for name in names if name in rank.phase_seconds]
    return milliseconds(sum(known)) if known else "-"


def _remarks(view: RunView) -> list[str]:
    slow = [rank.slow for rank in view.ranks if rank.slow is not None]
    if slow:
        return [_remark(each) for each in sorted(slow, key=lambda each: -each.excess_seconds)]
    if view.hidden:
        return ["cannot determine which rank is slow: collectives wait on the devices, and no rank for long"]
    if len(view.ranks) > 1 and not view.waits and view.step_seconds:
        return ["no rank waits for another in a collective that is seen, so none can be called slow"]
    return []


def _remark(slow: Straggler) -> str:
    share = slow.excess_seconds / slow.peer_seconds
    return (
        f"rank {slow.rank} is slow: {duration(slow.excess_seconds)} per step more work than its peers"
        f" ({share:+.0%}), {duration(slow.phase_excess_seconds)} of it in {slow.phase}"
    )


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
