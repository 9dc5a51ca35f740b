"""One verdict on a run that several nodes have ranks of. Pure: data in, dataclass out.

A node's verdict compares that node's ranks only, so the rank that it blames may itself wait for a rank of
another node. Here the ranks of all nodes are one job, with the model and the rules of a node's diagnosis.
What a node has measured is a finding in that job, and costs no more than the job gains without it.
"""

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from torchperfd.model.formatting import duration
from torchperfd.model.step_account import Account, Part, PartKind
from torchperfd_daemon.diagnosis.accounting import account_of
from torchperfd_daemon.diagnosis.cause_finders import (
    find_imbalance_of_stages,
    find_lateness,
    find_uneven_work,
)
from torchperfd_daemon.diagnosis.cause_table import MIN_CAUSE_SHARE
from torchperfd_daemon.diagnosis.cause_walk import Finding, Walk
from torchperfd_daemon.diagnosis.claims import limit_claim, unseen_words
from torchperfd_daemon.diagnosis.detect.straggler import (
    WAITING,
    RankWork,
    find_stragglers,
    mean_of,
    slowest_and_peers,
)
from torchperfd_daemon.diagnosis.edits import Edit, equal_work, less_exchange, less_host
from torchperfd_daemon.diagnosis.evidence import RankEvidence, wait_for_each_other
from torchperfd_daemon.diagnosis.job import Job
from torchperfd_daemon.diagnosis.verdict import Cause, Verdict

_MAX_NAMED: Final = 8
_ELSEWHERE: Final = "on no node that answers"
_QUIET: Final = frozenset({Cause.NONE, Cause.UNKNOWN, Cause.HANG})
# No rank waits for the rank with such a cause: the others save as well, and memory has cost nothing yet.
_BESIDE_STEPS: Final = frozenset({Cause.CHECKPOINT, Cause.MEMORY_PRESSURE, Cause.PIPELINE_IMBALANCE})
# All ranks are in a collective, and a node may see more of what it waits for than another.
_OF_THE_RUN: Final = frozenset({Cause.COLLECTIVE, Cause.SCRIPT_COLLECTIVES, Cause.UNEVEN_WORK})
_WAITS: Final = (PartKind.UNEVEN_WORK, PartKind.EXCHANGE)
_OF_THE_NODE: Final = frozenset(
    {Cause.CGROUP_THROTTLING, Cause.CPU_CONTENTION, Cause.GPU_THROTTLING, Cause.GPU_SHARED}
)


@dataclass(frozen=True, slots=True)
class NodePart:
    """One node's part in a run.

    Attributes:
        works: The recent own work of the node's training ranks.
    """

    node: str
    verdict: Verdict
    works: tuple[RankWork, ...]


def judge(run: str, parts: Sequence[NodePart], missing: int = 0, *, hidden: bool = False) -> Verdict:
    """Return the verdict on a run from its nodes' verdicts and work.

    - A hang comes first. A node that has compared several ranks takes precedence over a node with a single
      rank. If nodes disagree, the verdict names no rank.
    - If ranks wait for each other, a cause costs at most what the run gains without it. A cause that all
      ranks of some nodes share, but not most ranks of the run, is attributed to the latest rank of those
      nodes.
    - What no node can see alone is found among the ranks of all: a late rank, stages of a pipeline that work
      for different times, and uneven work.

    The costliest cause wins, of those that cost :data:`MIN_CAUSE_SHARE` of the step or more. Without any,
    :func:`~torchperfd_daemon.diagnosis.claims.limit_claim` decides whether the job is healthy.

    Args:
        parts: Each node's part; at least one.
        missing: The number of the run's ranks that no node has reported.
        hidden: Whether ranks wait for each other on their devices, in a way that is not measured.
    """
    job = _Nodes(parts) if any(part.works for part in parts) else None
    verdict = _worst(run, parts, job, hidden=hidden)
    # A lone node's verdict keeps the step that its cost was measured in, as `diagnose` there shows it.
    if verdict.cause is not Cause.HANG and job and not (len(parts) == 1 and verdict.step_seconds):
        verdict = replace(verdict, step_seconds=job.walk.step)
    # The nodes have judged all but what their ranks wait for.
    limited = limit_claim(verdict, job.means() if job else (), missing, unseen_where=_ELSEWHERE)
    if missing and not limited.unseen_ranks:
        words = unseen_words(missing, (len(job.walk.ranks) if job else 0) + missing, _ELSEWHERE)
        limited = replace(limited, evidence=f"{limited.evidence}; {words}", unseen_ranks=missing)
    if len(parts) > 1:
        account = job.account() if job and limited.cause is not Cause.HANG else None
        limited = replace(_with_growth(limited, parts), account=account)
    return _next(limited)


def _with_growth(verdict: Verdict, parts: Sequence[NodePart]) -> Verdict:
    """Return a verdict with the memory that grows on any node."""
    shown = {(each.rank, each.evidence) for each in (verdict, *verdict.others)}
    growing = [
        replace(each, others=(), account=None, node=each.node or part.node)
        for part in parts
        for each in (part.verdict, *part.verdict.others)
        if each.cause is Cause.MEMORY_PRESSURE and not each.cost_seconds_per_step
    ]
    further = [each for each in growing if (each.rank, each.evidence) not in shown]
    return replace(verdict, others=(*verdict.others, *further[:_MAX_NAMED]))


def _worst(run: str, parts: Sequence[NodePart], job: "_Nodes | None", *, hidden: bool) -> Verdict:
    hangs = [part for part in parts if part.verdict.cause is Cause.HANG]
    if hangs:
        return _hang(run, hangs)
    first = parts[0].verdict
    if len(parts) == 1 and not (first.cause is Cause.UNKNOWN and first.unseen_ranks):
        return first
    found = job.causes(run) if job else [part.verdict for part in parts if part.verdict.cause not in _QUIET]
    # An unknown cause counts only if no node has found another one.
    found = found or [part.verdict for part in parts if _is_unknown(part, job)]
    if found:
        return max(found, key=lambda verdict: verdict.cost_seconds_per_step)
    if job is None:
        return first
    step = duration(job.walk.step)
    if hidden:
        words = (
            "cannot determine which rank is slow: collectives wait on the device; no other cause takes"
            f" {MIN_CAUSE_SHARE:.0%} of a {step} step, on {len(parts)} nodes"
        )
        return Verdict(Cause.UNKNOWN, run, phase="collective_wait", evidence=words)
    nodes = f"{len(parts)} node{'s' if len(parts) > 1 else ''}"
    words = f"nothing takes {MIN_CAUSE_SHARE:.0%} of a {step} step without need, on {nodes}"
    return Verdict(Cause.NONE, run, evidence=words)


def _is_unknown(part: NodePart, job: "_Nodes | None") -> bool:
    """Return whether a node's verdict makes the cause unknown for the whole run.

    Without a cost it does not if the node's ranks have no steps yet, which is no verdict on the others,
    or if ranks of other nodes explain it.
    """
    verdict = part.verdict
    if verdict.cause is not Cause.UNKNOWN:
        return False
    if verdict.cost_seconds_per_step or job is None:
        return True
    is_explained = verdict.unseen_ranks or (job.walk.job.together and verdict.phase in WAITING)
    return bool(part.works) and not is_explained


class _Nodes:
    """The ranks of a run on all nodes, as one job; at least one rank."""

    def __init__(self, parts: Sequence[NodePart]) -> None:
        self._parts = parts
        works = {work.rank: work for part in parts for work in part.works}
        ranks = [_evidence(work, part.node) for part in parts for work in part.works]
        ranks.sort(key=lambda each: each.rank)
        if wait_for_each_other(ranks):
            slowest = [works[each.rank] for each in sorted(ranks, key=_slowest_first)]
            late = {each.rank: each for each in find_stragglers(slowest_and_peers(slowest), len(slowest))}
            ranks = [
                replace(each, late_seconds=late[each.rank].excess_seconds, late_phase=late[each.rank].phase)
                if each.rank in late
                else each
                for each in ranks
            ]
        self.walk = Walk(Job.of(ranks, works), None)
        self._place = {rank.rank: place for place, rank in enumerate(ranks)}
        self._sharing = Counter[Cause]()
        for part in parts:
            if part.verdict.rank is None:
                self._sharing[part.verdict.cause] += len(part.works)

    def causes(self, run: str) -> list[Verdict]:
        """Return the causes that nodes have found, with their costs to the run, and those among all ranks."""
        walk, kept = self.walk, self._of_nodes()
        find_lateness(walk)
        find_imbalance_of_stages(walk)
        if all(verdict.cause is not Cause.UNEVEN_WORK for verdict in kept):
            find_uneven_work(walk)
        found = []
        for each in walk.found[len(kept) :]:
            node = each.where.node if each.rank is not None else ""
            found.append(Verdict(each.cause, run, node, each.rank, each.phase, each.words, each.cost_seconds))
        if any(each.cause is Cause.PIPELINE_IMBALANCE for each in found):
            # A node that has seen several stages may not have seen all.
            kept = [each for each in kept if each.cause is not Cause.PIPELINE_IMBALANCE]
        return [*kept, *found]

    def _of_nodes(self) -> list[Verdict]:
        """Add the nodes' verdicts to the findings, the costliest first; return those that cost the run time.

        The other causes of a node were compared on that node only, unless all ranks share them.
        """
        verdicts = [
            (part, replace(each, others=(), account=None))
            for part in self._parts
            for each in (part.verdict, *part.verdict.others)
            if each.cause not in _QUIET and (each is part.verdict or each.cause in _OF_THE_RUN)
        ]
        verdicts.sort(key=lambda each: (-each[1].cost_seconds_per_step, each[0].node))
        kept: list[Verdict] = []
        for part, verdict in verdicts:
            placed = self._placed(part, verdict)
            if placed is None or any((each.cause, each.rank) == (placed.cause, placed.rank) for each in kept):
                continue
            bounded = self._add(part, verdict, placed)
            if bounded is not None:
                kept.append(bounded)
        return kept

    def _placed(self, part: NodePart, verdict: Verdict) -> Verdict | None:
        """Return a node's verdict with the rank or node that it is about; None if that is no cause here."""
        together, of_all = self.walk.job.together, verdict.rank is None
        if verdict.cause in _BESIDE_STEPS or not of_all:
            return verdict
        if self._is_of_most(verdict.cause) or (together and verdict.cause in _OF_THE_RUN):
            return replace(verdict, node="") if together else verdict
        if not together:
            return replace(verdict, evidence=f"{verdict.evidence}, on {part.node}")
        if verdict.cause is Cause.SCRIPT_CODE:
            return None  # Code that other nodes' ranks do not run makes a rank slow.
        if not part.works:
            return verdict
        latest = max(part.works, key=lambda work: work.own_seconds).rank
        alike = f", as on all {len(part.works)} ranks of the node" if len(part.works) > 1 else ""
        return replace(verdict, node=part.node, rank=latest, evidence=f"{verdict.evidence}{alike}")

    def _add(self, part: NodePart, verdict: Verdict, placed: Verdict) -> Verdict | None:
        """Add a node's verdict to the findings; return it with its cost to the run, None if negligible.

        Args:
            verdict: What the node says.
            placed: The same with the rank that it is about in the run.
        """
        walk, cost = self.walk, verdict.cost_seconds_per_step
        ranks = [work.rank for work in part.works] if placed.node and verdict.rank is None else [placed.rank]
        places = [self._place[rank] for rank in ranks if rank in self._place]
        edit = less_host({})
        if verdict.cause not in _BESIDE_STEPS:
            edit = self._edit(verdict, places)
            is_known = placed.rank is None or places
            if walk.job.together and is_known:
                cost = min(cost, walk.job.gain(edit))
            if walk.job.together and cost < walk.least:
                return None
            for place in places:
                walk.late[place] = max(0.0, walk.late[place] - cost)
        where = walk.ranks[places[0] if places else 0]
        walk.add(Finding(placed.cause, where, placed.rank, cost, placed.evidence, edit, placed.phase))
        return replace(placed, cost_seconds_per_step=cost)

    def _edit(self, verdict: Verdict, places: Sequence[int]) -> Edit:
        """Return the edit without a cause that a node has found at these places, or else on all ranks."""
        cost = verdict.cost_seconds_per_step
        if verdict.cause in (Cause.COLLECTIVE, Cause.SCRIPT_COLLECTIVES):
            return less_exchange(cost)
        if verdict.cause is Cause.UNEVEN_WORK:
            return equal_work(self.walk.job.groups)
        if verdict.rank is not None:
            return less_host(dict.fromkeys(places, cost), peaks=True)
        return less_host(dict.fromkeys(places or range(len(self.walk.ranks)), cost), verdict.phase)

    def _is_of_most(self, cause: Cause) -> bool:
        """Return whether the nodes on which all ranks share a cause have more than half of the ranks."""
        return 2 * self._sharing[cause] > len(self.walk.ranks)

    def means(self) -> list[RankEvidence]:
        """Return each rank's mean step, of which only the wait for others is apart."""
        return [
            RankEvidence(
                each.rank,
                each.node,
                each.step_seconds,
                {"forward": each.own_seconds, "collective_wait": each.wait_seconds},
                stage=each.stage,
            )
            for each in self.walk.ranks
        ]

    def account(self) -> Account:
        """Return the account of the step of all nodes' ranks.

        Nodes send means of blocks of steps, in which work that differs from step to step evens out. As much
        of the exchange is a wait for it as on the node that has most of it.
        """
        account = account_of(self.walk)
        of_nodes = [part.verdict.account for part in self._parts if part.verdict.account is not None]
        uneven = max((each.share(PartKind.UNEVEN_WORK) for each in of_nodes), default=0.0)
        return _with_uneven(account, uneven * account.step_seconds)


def _slowest_first(rank: RankEvidence) -> float:
    # In whole nanoseconds: ranks that differ by a rounding error stay in their order.
    return -round(rank.own_seconds, 9)


def _evidence(work: RankWork, node: str) -> RankEvidence:
    phases = {name: mean_of(column) for name, column in work.phase_seconds.items() if len(column)}
    return RankEvidence(work.rank, node, sum(phases.values()), phases, stage=work.stage)


def _with_uneven(account: Account, least: float) -> Account:
    """Return the account in which uneven work takes so much at least, of what is the exchange's."""
    there = {kind: account.seconds(kind) for kind in _WAITS}
    more = min(max(0.0, least - there[PartKind.UNEVEN_WORK]), there[PartKind.EXCHANGE])
    changed = (
        Part(PartKind.UNEVEN_WORK, "", there[PartKind.UNEVEN_WORK] + more),
        Part(PartKind.EXCHANGE, "", there[PartKind.EXCHANGE] - more),
    )
    parts = [part for part in account.parts if part.kind not in _WAITS]
    parts += [part for part in changed if part.seconds > 0]
    return replace(account, parts=tuple(sorted(parts, key=lambda part: -part.seconds)))


def _hang(run: str, hangs: Sequence[NodePart]) -> Verdict:
    longest = max(hangs, key=lambda part: part.verdict.stalled_seconds).verdict
    naming = [part for part in hangs if part.verdict.rank is not None]
    naming = [part for part in naming if len(part.works) > 1] or naming
    if len(naming) == 1:
        return naming[0].verdict
    if not naming:
        return longest
    ranks = sorted({part.verdict.rank for part in naming if part.verdict.rank is not None})
    named = ", ".join(map(str, ranks[:_MAX_NAMED]))
    lasted = longest.stalled_seconds
    words = f"no step for {lasted:.0f} s; {len(naming)} nodes blame ranks {named}: compare all stacks"
    return Verdict(Cause.HANG, run, "", None, "", words, 0.0, "", stalled_seconds=lasted)


def _next(verdict: Verdict) -> Verdict:
    """Return the verdict with the next command, made here: people run it, so no peer may supply it."""
    run = shlex.quote(verdict.run)
    command = f"torchperfd capture --run {run} --fleet --steps 5"
    if verdict.cause is Cause.HANG:
        command = f"torchperfd stacks --run {run} --fleet"
    elif verdict.cause in _OF_THE_NODE:
        command = "torchperfd doctor"
    elif verdict.cause is Cause.MEMORY_PRESSURE:
        command = f"torchperfd capture --run {run} --fleet --kind memory"
    elif verdict.cause is Cause.UNKNOWN and not verdict.cost_seconds_per_step and not verdict.phase:
        command = "torchperfd ps --fleet"
    return replace(verdict, next_command=command)
