"""``torchperfd ranks``: how the ranks of runs spend their steps."""

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import click

from torchperfd.document.blocks import Document, Sentences
from torchperfd.document.tables import Table
from torchperfd.model.formatting import duration, milliseconds
from torchperfd.model.step_account import Account
from torchperfd_cli.commands import _output
from torchperfd_cli.commands._output import Answer, fitted_phases, live
from torchperfd_cli.commands._scope import Scope, last_option, missing, scope_options
from torchperfd_cli.commands._series import SeriesOptions
from torchperfd_daemon.views.model import WAIT, RankView, RunView, behind_text, of_the_present

if TYPE_CHECKING:
    from torchperfd_daemon.diagnosis.detect.straggler import Straggler

_TRAINING: Final = "training"
_REST: Final = "REST"
_NEWEST_STEPS: Final = 128
"""The most that are asked for: of so many, those of the present are shown."""


@click.command("ranks")
@scope_options
@last_option(None, "those of ten seconds, 12 to 128")
@live
def ranks_command(
    run: str,
    job: str,
    fleet: bool,
    series: SeriesOptions,
    last: int | None,
    socket: str | None,
    as_json: bool,
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
    with scope.connect(socket, of_ranks=True) as daemon:
        # Imports numpy, while a store of series answers.
        from torchperfd_daemon.views import live as _view

        scope = scope.whole(daemon)
        answer = scope.steps(daemon, last or _NEWEST_STEPS)
        runs = _view.runs(answer.ranks if last else map(of_the_present, answer.ranks))
        accounts = _accounts(scope, daemon, runs)
    if as_json:
        from torchperfd_daemon.views.documents import fleet_dict

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
    times = rank.phase_seconds
    if times.keys().isdisjoint(names):
        return "-"
    return milliseconds(sum(times[name] for name in names if name in times))


def _remarks(view: RunView) -> list[str]:
    slow = [rank.slow for rank in view.ranks if rank.slow is not None]
    if slow:
        return [_remark(each) for each in sorted(slow, key=lambda each: -each.excess_seconds)]
    if view.hidden:
        return ["cannot determine which rank is slow: collectives wait on the devices, and no rank for long"]
    if len(view.ranks) > 1 and not view.waits and view.step_seconds:
        return ["no rank waits for another in a collective that is seen, so none can be called slow"]
    return []


def _remark(slow: "Straggler") -> str:
    share = slow.excess_seconds / slow.peer_seconds
    return (
        f"rank {slow.rank} is slow: {duration(slow.excess_seconds)} per step more work than its peers"
        f" ({share:+.0%}), {duration(slow.phase_excess_seconds)} of it in {slow.phase}"
    )
