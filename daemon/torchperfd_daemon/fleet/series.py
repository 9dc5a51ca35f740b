"""Reads what the metrics of all nodes contain about runs, from a store of series, with few and cheap queries.

Each query is about the present and has a series per node, or one per rank at most. Only the phases of ranks
are rates over a range, and of large runs they are read for the slowest ranks.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from torchperfd.model.step_account import PartKind
from torchperfd_daemon.errors import NoSuchTargetError
from torchperfd_daemon.fleet.series_model import (
    CauseSeries,
    NodeSeries,
    RankSeries,
    RunSeries,
    Series,
    Source,
)
from torchperfd_daemon.fleet.series_store import SeriesStore, Vector
from torchperfd_daemon.store.model import PARALLELISM_KINDS, State

MAX_WHOLE: Final = 1024
"""With more ranks in all runs together, phases are read for the slowest ranks of each run and some peers."""
MAX_COMPARED_RUNS: Final = 32
"""Runs of which phases are read then."""
RANGE: Final = "2m"
"""Four scrapes of the usual interval."""
_P: Final = "torchperfd_train_"
_SOURCE: Final = "cluster, job, instance"
_OF_RANKS: Final = ("own_work_seconds", "peer_wait_seconds")
_OF_VERDICTS: Final = ("verdict", "cause_seconds", "stalled_seconds", "verdict_unseen_ranks")
_TRAINING: Final = State.TRAINING.value


def list_runs(store: SeriesStore) -> dict[str, str]:
    """Return the job of each run that has series now, by the run's name.

    Raises:
        NoSuchTargetError: The store has no series of torchperfd.
    """
    found = store.query(f"count by (run, job_name) ({_P}rank_info)").rows
    if not found:
        raise _no_series(store)
    return {labels.get("run", ""): labels.get("job_name", "") for labels, _ in found}


def read_series(store: SeriesStore, run: str = "", job: str = "", *, with_status: bool = False) -> Series:
    """Read all runs, one run, or those of a job.

    Args:
        with_status: Also the states, steps and coordinates of ranks, and the phases of all of them if they
            are few.

    Raises:
        NoSuchTargetError: There is no such run or job, or no series of torchperfd at all.
    """
    chosen = _matcher(store, run, job)
    uneven = f"part={_quoted(PartKind.UNEVEN_WORK.value)}"
    # Those that take longest come first, since few are made at the same time.
    asked = {name: _of(name, chosen) for name in _OF_RANKS}
    if with_status:
        asked |= {"steps": _of("steps_total", chosen), "newest": _newest_query(chosen, 'rank=~".*0"')}
    asked |= {
        "parts": f"avg by (run, part, name) ({_of('step_part_seconds', chosen)})",
        **{name: _of(name, chosen) for name in _OF_VERDICTS},
        # Of one rank of each node and of one of each run: the others have the same.
        "nodes": _of("rank_info", chosen, 'local_rank="0"'),
        "worlds": _of("world_size", chosen, 'rank="0"'),
        "down": 'up{job=~".*torchperfd.*"} == 0',
        "stages": _places_query("pipeline", chosen),
        "uneven": f"max by (run) ({_of('step_part_seconds', chosen, uneven)})",
    }
    answers = dict(zip(asked, store.query_all([*asked.values()]), strict=True))
    runs, own = _runs_of(answers["nodes"]), answers[_OF_RANKS[0]]
    _add_worlds(runs, answers["worlds"])
    if not _count_ranks(runs, own):
        # Some ranks make no steps or are elsewhere: those that are here have to be counted.
        answers["nodes"] = store.query(
            f"count by ({_SOURCE}, run, node, job_name) ({_of('rank_info', chosen)})"
        )
        if not answers["nodes"].rows:
            raise _no_series(store, run, job)
        runs = _runs_of(answers["nodes"])
        _add_worlds(runs, answers["worlds"])
        if not all(each.world_size for each in runs.values()):
            _add_worlds(runs, store.query(f"max by (run) ({_of('world_size', chosen)})"))
    partial = (answer.partial for answer in answers.values())
    found = Series(
        runs,
        tuple(sorted({labels.get("instance", "") for labels, _ in answers["down"].rows})),
        "; ".join(dict.fromkeys(filter(None, partial))),
    )
    _add_work(found.runs, *(answers[name] for name in _OF_RANKS))
    _add_verdicts(found.runs, [answers[name] for name in _OF_VERDICTS])
    _add_parts(found.runs, answers["parts"], answers["uneven"])
    _add_places(found.runs, answers["stages"], ("pipeline",))
    if with_status:
        _add_status(store, found.runs, chosen, answers["steps"], answers["newest"])
    _add_phases(store, found.runs, chosen, all_ranks=with_status)
    return found


def _of(name: str, chosen: str, *more: str) -> str:
    matchers = ",".join(filter(None, (chosen, *more)))
    return f"{_P}{name}{{{matchers}}}"


def _places_query(kind: str, chosen: str) -> str:
    """Return the query for the places of ranks in one kind of parallelism; it finds nothing without that."""
    infos = _of("rank_info", chosen, f'{kind}_rank!=""')
    return f"count by (run, rank, {kind}_rank) ({infos})"


def _newest_query(chosen: str, some: str = "") -> str:
    """Return the query for the end of the newest step of each run, among all ranks or some of them."""
    return f"max by (run) ({_of('last_step_timestamp_seconds', chosen, some)})"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def _matcher(store: SeriesStore, run: str, job: str) -> str:
    """Return what selects the series of a run, or of the runs of a job; empty for all."""
    if not job:
        return f"run={_quoted(run)}" if run else ""
    rows = store.query(f"count by (run) ({_of('rank_info', f'job_name={_quoted(job)}')})").rows
    runs = {name for labels, _ in rows if run in ("", name := labels.get("run", ""))}
    if not runs:
        raise _no_series(store, run, job)
    return f"run=~{_quoted('|'.join(map(re.escape, sorted(runs))))}"


def _no_series(store: SeriesStore, run: str = "", job: str = "") -> NoSuchTargetError:
    name = " of job ".join(each[:80] for each in (f"run {run}" if run else "", job) if each)
    if name:
        return NoSuchTargetError(f"{store.address} has no series of {name} now", "leave out --run and --job")
    return NoSuchTargetError(
        f"{store.address} has no series of torchperfd from the last minutes",
        "scrape the daemons, as docs/operating.md shows",
    )


def _source(labels: Mapping[str, str]) -> Source:
    return labels.get("cluster", ""), labels.get("job", ""), labels.get("instance", "")


def _runs_of(nodes: Vector) -> dict[str, RunSeries]:
    runs: dict[str, RunSeries] = {}
    for labels, ranks in nodes.rows:
        name = labels.get("run", "")
        run = runs.setdefault(name, RunSeries(name, labels.get("job_name", "")))
        node = run.nodes.setdefault(_source(labels), NodeSeries(labels.get("node", "")))
        node.ranks += int(ranks)
    return runs


def _count_ranks(runs: Mapping[str, RunSeries], own: Vector) -> bool:
    """Count the ranks of each node by their work; return whether these are all ranks of all runs."""
    counts = Counter((labels.get("run", ""), _source(labels)) for labels, _ in own.rows)
    for (name, source), count in counts.items():
        node = runs[name].nodes.get(source) if name in runs else None
        if node is None:
            return False
        node.ranks = count
    worlds = Counter[str]()
    for (name, _), count in counts.items():
        worlds[name] += count
    return bool(runs) and all(run.world_size == worlds[name] for name, run in runs.items())


def _add_worlds(runs: Mapping[str, RunSeries], worlds: Vector) -> None:
    for labels, world in worlds.rows:
        if run := runs.get(labels.get("run", "")):
            run.world_size = max(run.world_size, int(world))


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 9 else None


def _rank(runs: Mapping[str, RunSeries], labels: Mapping[str, str]) -> RankSeries | None:
    """Return the rank that a series is of, added if it is new; None if it is of none that is known."""
    run, number = runs.get(labels.get("run", "")), _number(labels.get("rank", ""))
    if run is None or number is None:
        return None
    rank = run.ranks.get(number)
    if rank is None:
        rank = run.ranks[number] = RankSeries(number, _source(labels))
    return rank


def _add_work(runs: Mapping[str, RunSeries], own: Vector, wait: Vector) -> None:
    for labels, seconds in own.rows:
        if rank := _rank(runs, labels):
            rank.own_seconds = seconds
    for labels, seconds in wait.rows:
        if rank := _rank(runs, labels):
            rank.wait_seconds = seconds
    for run in runs.values():
        run.find_slowest()


def _add_parts(runs: Mapping[str, RunSeries], parts: Vector, most_uneven: Vector) -> None:
    for labels, seconds in parts.rows:
        if run := runs.get(labels.get("run", "")):
            run.parts[labels.get("part", ""), labels.get("name", "")] = seconds
    for labels, seconds in most_uneven.rows:
        if run := runs.get(labels.get("run", "")):
            run.uneven_seconds = seconds


def _add_verdicts(runs: Mapping[str, RunSeries], answers: Sequence[Vector]) -> None:
    verdicts, costs, stalled, unseen = (
        [
            (node, labels, value)
            for labels, value in answer.rows
            if (run := runs.get(labels.get("run", ""))) and (node := run.nodes.get(_source(labels)))
        ]
        for answer in answers
    )
    for node, labels, _ in verdicts:
        node.cause = labels.get("cause", "")
    for node, labels, seconds in costs:
        rank = _number(labels.get("blamed_rank", ""))
        node.causes.append(CauseSeries(labels.get("cause", ""), rank, labels.get("phase", ""), seconds))
    for node, _, seconds in stalled:
        node.stalled_seconds = seconds
    for node, _, count in unseen:
        node.unseen = int(count)


def _add_places(runs: Mapping[str, RunSeries], answer: Vector, kinds: Iterable[str]) -> None:
    for labels, _ in answer.rows:
        if rank := _rank(runs, labels):
            places = {kind: _number(labels.get(f"{kind}_rank", "")) for kind in kinds}
            rank.places |= {kind: place for kind, place in places.items() if place is not None}


def _add_status(
    store: SeriesStore, runs: Mapping[str, RunSeries], chosen: str, steps: Vector, last: Vector
) -> None:
    for labels, count in steps.rows:
        if rank := _rank(runs, labels):
            rank.steps = int(count)
    if len(last.rows) < len(runs):
        last = store.query(_newest_query(chosen))
    newest = {labels.get("run", ""): at for labels, at in last.rows}
    for run in runs.values():
        for rank in run.ranks.values():
            rank.last_step_unix_seconds = newest.get(run.run, 0.0)
    asked = {kind: _places_query(kind, chosen) for kind in PARALLELISM_KINDS if kind != "pipeline"}
    # A rank with own work is in training.
    is_known = all(rank.own_seconds is not None for run in runs.values() for rank in run.ranks.values())
    others = [] if is_known else [f"{_of('state', chosen, f'state!={_quoted(_TRAINING)}')} == 1"]
    answers = store.query_all([*asked.values(), *others])
    for kind, answer in zip(asked, answers, strict=False):
        _add_places(runs, answer, (kind,))
    for answer in answers[len(asked) :]:
        for labels, _ in answer.rows:
            if rank := _rank(runs, labels):
                rank.state = labels.get("state", "")


def _add_phases(store: SeriesStore, runs: Mapping[str, RunSeries], chosen: str, *, all_ranks: bool) -> None:
    """Read the shares of phases and the errors: of all ranks if they are few, else of those to compare."""
    if all_ranks and sum(len(run.ranks) for run in runs.values()) <= MAX_WHOLE:
        selected = [chosen]
    else:
        compared = [run for run in runs.values() if run.compared]
        selected = [_ranks_matcher(run.run, run.compared) for run in compared[:MAX_COMPARED_RUNS]]
    if not selected:
        return
    of_steps = 'phase!="validate"'
    expressions = [
        " or ".join(f"rate({_of(name, each, of_steps)}[{RANGE}])" for each in selected)
        for name in ("phase_seconds_total", "phase_device_seconds_total")
    ]
    with_error = selected if len(selected) < MAX_COMPARED_RUNS else [chosen]
    expressions.append(" or ".join(_of("own_work_error_seconds", each) for each in with_error))
    host, device, error = store.query_all(expressions)
    for labels, seconds in error.rows:
        if rank := _rank(runs, labels):
            rank.error_seconds = seconds
    for labels, seconds in host.rows:
        if rank := _rank(runs, labels):
            rank.phase_seconds[labels.get("phase", "")] = seconds
    for labels, seconds in device.rows:
        if rank := _rank(runs, labels):
            rank.device_seconds[labels.get("phase", "")] = seconds


def _ranks_matcher(run: str, ranks: Collection[RankSeries]) -> str:
    return f"run={_quoted(run)},rank=~{_quoted('|'.join(str(each.rank) for each in ranks))}"
