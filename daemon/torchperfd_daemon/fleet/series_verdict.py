"""One verdict on a run from its series, by the rules for daemons that ask each other. Pure."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import numpy as np

from torchperfd.model.step_account import Account, Part, PartKind
from torchperfd_daemon.diagnosis.cause_table import HOST_BOUND, MEASURED, SYNCHRONISATION
from torchperfd_daemon.diagnosis.detect.straggler import RankWork, steps_with_error
from torchperfd_daemon.diagnosis.edits import DATA
from torchperfd_daemon.diagnosis.verdict import Cause, Verdict, of_step, working_command
from torchperfd_daemon.fleet.series_model import CauseSeries, NodeSeries, RankSeries, RunSeries, Source
from torchperfd_daemon.fleet.verdict import NodePart, judge

_CAUSES: Final = {cause.value: cause for cause in Cause}
_PARTS: Final = {kind.value: kind for kind in PartKind}
_WORDS: Final = {row.cause: row.words for row in reversed((*MEASURED, SYNCHRONISATION, HOST_BOUND))}
_OWN: Final = (PartKind.COMPUTING, PartKind.UNNAMED)
MAX_JUDGED: Final = 512
"""Ranks of a run that are all looked at."""
MIN_ALIKE: Final = 16
"""Of so many nodes of a large run, all but one have the same verdict."""
WAIT: Final = "collective_wait"
_COMPUTES: Final = "forward"


def verdict_on(run: RunSeries) -> Verdict | None:
    """Return the verdict on a run; None if no node has a verdict on it."""
    works: dict[Source, list[RankWork]] = {}
    training = [rank for rank in run.ranks.values() if rank.own_seconds is not None]
    on_device = are_on_device(run)
    compared = {id(rank) for rank in run.compared}
    for rank in _judged(run, training):
        node = run.nodes.get(rank.source)
        data = _data_seconds(node) if node is not None else 0.0
        work = rank_work(rank, on_device=on_device, compared=id(rank) in compared, data_seconds=data)
        works.setdefault(rank.source, []).append(work)
    steps = {rank.rank: (rank.own_seconds or 0.0) + (rank.wait_seconds or 0.0) for rank in training}
    account = _account(run)
    parts = [
        NodePart(
            node.node,
            _verdict(run, node, account, {work.rank: steps[work.rank] for work in works.get(source, ())}),
            tuple(works.get(source, ())),
        )
        for source, node in sorted(run.nodes.items(), key=lambda each: each[1].node)
        if node.cause
    ]
    if not parts:
        return None
    waits = any(rank.wait_seconds is not None for rank in training)
    found = judge(run.run, parts, run.missing, hidden=len(training) > 1 and not waits)
    command = working_command(found.next_command, is_over=not training, has_cuda=False)
    account = found.account and _with_phases(found.account, account)
    return replace(found, next_command=command, account=account)


def _judged(run: RunSeries, training: list[RankSeries]) -> list[RankSeries]:
    """Return the ranks by which a run is judged, by number: all, or of a large run those that decide.

    The step of a run follows from its slowest rank. One rank of each node stands for its neighbours, unless
    the node has a verdict of its own: the ranks of these are all there.
    """
    training = sorted(training, key=lambda rank: rank.rank)
    causes = Counter(node.cause for node in run.nodes.values())
    [(usual, count)] = causes.most_common(1)
    apart = sum(causes.values()) - count
    if len(training) <= MAX_JUDGED or run.missing or apart > len(run.nodes) // MIN_ALIKE:
        return training
    slowest = {id(rank) for rank in run.slowest}
    seen: set[Source] = set()
    judged = []
    for rank in training:
        node = run.nodes.get(rank.source)
        is_first = rank.source not in seen
        seen.add(rank.source)
        if is_first or id(rank) in slowest or (node is not None and node.cause != usual):
            judged.append(rank)
    return judged


def are_on_device(run: RunSeries) -> bool:
    """Return whether a run's ranks wait for each other on their devices, so that these are compared."""
    host, device = (
        sum(phases.get(WAIT, 0.0) for phases in each)
        for each in (
            [rank.phase_seconds for rank in run.ranks.values()],
            [rank.device_seconds for rank in run.ranks.values()],
        )
    )
    return device > host


def rank_work(
    rank: RankSeries,
    *,
    on_device: bool,
    compared: bool = True,
    data_seconds: float = 0.0,
    undivided: str = _COMPUTES,
) -> RankWork:
    """Return the work of a rank that makes steps.

    Args:
        on_device: Whether its phases are those on its device.
        compared: Whether it has to have the steps that a comparison needs; else it has its mean step.
        data_seconds: Its wait for data, where its phases were not read.
        undivided: The phase that has the rest of its own work then.
    """
    own, wait = rank.own_seconds or 0.0, rank.wait_seconds or 0.0
    phases = own_phases(rank, on_device=on_device)
    if not phases:
        data = min(data_seconds, own)
        phases = {undivided: own - data, **({DATA: data} if data else {})}
    if compared and math.isfinite(rank.error_seconds):
        steps = steps_with_error(np.array([*phases.values()]), rank.error_seconds)
        columns = dict(zip(phases, steps, strict=True))
        columns[WAIT] = np.full(steps.shape[1], wait)
    else:
        columns = {name: np.array([mean]) for name, mean in phases.items()}
        columns[WAIT] = np.array([wait])
    return RankWork(rank.rank, columns, rank.places.get("pipeline"))


def own_phases(rank: RankSeries, *, on_device: bool) -> dict[str, float]:
    """Return a rank's phases without its waits, in seconds that sum to its own work; empty if unknown."""
    rates = rank.device_seconds if on_device else rank.phase_seconds
    rates = {name: rate for name, rate in rates.items() if name != WAIT}
    whole = sum(rates.values())
    if whole <= 0 or rank.own_seconds is None:
        return {}
    return {name: rate * rank.own_seconds / whole for name, rate in sorted(rates.items())}


def _data_seconds(node: NodeSeries) -> float:
    """Return the wait for data that a node's causes of all its ranks claim."""
    of_all = (each.seconds for each in node.causes if each.rank is None and each.phase == DATA)
    return max(of_all, default=0.0)


def _verdict(
    run: RunSeries, node: NodeSeries, account: Account | None, steps: Mapping[int, float]
) -> Verdict:
    """Return the verdict of a node's daemon, as far as series have it.

    Args:
        steps: The mean step of each of its ranks.
    """
    step = max(steps.values(), default=0.0)
    found = [
        _cause(run.run, node, each, step if each.rank is None else steps.get(each.rank, step))
        for each in node.causes
    ]
    first = next((each for each in found if each.cause.value == node.cause), None)
    if first is None:
        cause = _CAUSES.get(node.cause, Cause.UNKNOWN)
        first = Verdict(
            cause, run.run, node.node, step_seconds=step, unseen_ranks=node.unseen, account=account
        )
        if cause is Cause.NONE and not found:
            return first  # That of most nodes of a large run.
    if first.cause is Cause.UNKNOWN:
        first = replace(
            first, evidence=f"the daemon of {node.node} finds no cause and does not call it healthy"
        )
    if first.cause is Cause.HANG:
        words = f"no step for {node.stalled_seconds:.0f} s"
        first = replace(first, evidence=words, stalled_seconds=node.stalled_seconds)
    others = sorted((each for each in found if each is not first), key=lambda each: -each.share)
    return replace(first, others=tuple(others), unseen_ranks=node.unseen, account=account)


def _cause(run: str, node: NodeSeries, cost: CauseSeries, step: float) -> Verdict:
    cause = _CAUSES.get(cost.cause, Cause.UNKNOWN)
    words = _WORDS.get(cause) or (f"in {cost.phase}" if cost.phase else "lost")
    # It was measured when the cause was found; steps may have become shorter since.
    seconds = min(cost.seconds, step) if step else cost.seconds
    evidence = f"{of_step(seconds, step)} {words}" if seconds and step else cause.value
    return Verdict(cause, run, node.node, cost.rank, cost.phase, evidence, seconds, step_seconds=step)


def _with_phases(account: Account, of_nodes: Account | None) -> Account:
    """Return an account of all nodes, with their ranks' own work divided as in the mean account of a node."""
    own = [part for part in of_nodes.parts if part.kind in _OWN] if of_nodes else []
    share = account.seconds(*_OWN) / sum(part.seconds for part in own) if own else 0.0
    if share <= 0:
        return account
    divided = [replace(part, seconds=part.seconds * share) for part in own]
    parts = [*divided, *(part for part in account.parts if part.kind not in _OWN)]
    return replace(account, parts=tuple(sorted(parts, key=lambda part: -part.seconds)))


def _account(run: RunSeries) -> Account | None:
    """Return the mean account of a run's nodes, with the uneven work of the node that has most of it.

    What that is more is the exchange's, as on that node.
    """
    seconds = {
        (_PARTS[kind], name): value
        for (kind, name), value in run.parts.items()
        if kind in _PARTS and value > 0
    }
    step = sum(seconds.values())
    if step <= 0:
        return None
    uneven, exchange = (PartKind.UNEVEN_WORK, ""), (PartKind.EXCHANGE, "")
    more = min(max(0.0, run.uneven_seconds - seconds.get(uneven, 0.0)), seconds.get(exchange, 0.0))
    seconds[uneven] = seconds.get(uneven, 0.0) + more
    seconds[exchange] = seconds.get(exchange, 0.0) - more
    parts = [Part(kind, name, value) for (kind, name), value in seconds.items() if value > 0]
    return Account(step, step, tuple(sorted(parts, key=lambda part: -part.seconds)))


def hang_seconds(run: RunSeries) -> Mapping[Source, float]:
    """Return for how long the ranks of each node that hangs have made no step."""
    return {source: node.stalled_seconds for source, node in run.nodes.items() if node.stalled_seconds}
