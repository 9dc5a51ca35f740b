"""One verdict on a run that several nodes have ranks of. Pure: data in, dataclass out.

A node's verdict compares that node's ranks only, so the rank that it blames may itself wait for a rank of
another node. This module compares the ranks of all nodes by own work. A node's verdict then costs no more
than the run really waits for the rank that it blames.
"""

import shlex
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np

from torchperfd.model.formatting import duration
from torchperfd.model.step_account import Account, Part, PartKind
from torchperfd_daemon.diagnosis import Cause, RankEvidence, Verdict
from torchperfd_daemon.diagnosis.accounting import account_of
from torchperfd_daemon.diagnosis.cause_table import MIN_CAUSE_SHARE
from torchperfd_daemon.diagnosis.cause_walk import Walk
from torchperfd_daemon.diagnosis.claims import limit_claim, unseen_words
from torchperfd_daemon.diagnosis.detect import RankWork, Straggler, find_stragglers
from torchperfd_daemon.diagnosis.detect.straggler import WAITING, slowest_and_peers
from torchperfd_daemon.diagnosis.job import Job
from torchperfd_daemon.diagnosis.waits import are_material, find_imbalance, mean_own, mean_wait

_MAX_NAMED: Final = 8
_ELSEWHERE: Final = "on no node that answers"
_QUIET: Final = frozenset({Cause.NONE, Cause.UNKNOWN, Cause.HANG})
# No rank waits for the rank with such a cause: the others save as well, and memory has cost nothing yet.
_BESIDE_STEPS: Final = frozenset({Cause.CHECKPOINT, Cause.MEMORY_PRESSURE, Cause.PIPELINE_IMBALANCE})
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


def judge(
    run: str, parts: Sequence[NodePart], missing: int = 0, *, hidden: bool = False, on_device: bool = False
) -> Verdict:
    """Return the verdict on a run from its nodes' verdicts and work.

    - A hang comes first. A node that has compared several ranks takes precedence over a node with a single
      rank. If nodes disagree, the verdict names no rank.
    - If ranks wait for each other, a cause costs at most the lateness of its rank among the ranks of all
      nodes. Time in collectives costs at most the wait of the rank that waits least. A cause that all ranks
      of some nodes share, but not most ranks of the run, is attributed to the latest rank of those nodes.
    - A late rank whose node found no cause is slow, or input bound.

    The costliest cause wins. A cause that costs less than :data:`MIN_SHARE` of the step is left out. If no
    cause is left, :func:`~torchperfd_daemon.diagnosis.claims.limit_claim` decides whether the job is healthy.

    Args:
        parts: Each node's part; at least one.
        missing: The number of the run's ranks that no node has reported.
        hidden: Whether ranks wait for each other on their devices, in a way that is not measured.
        on_device: Whether the nodes' times are those of devices.
    """
    job = _Job(parts)
    verdict = _worst(run, parts, job, hidden=hidden)
    if verdict.cause is not Cause.HANG and job.all:
        verdict = replace(verdict, step_seconds=job.step_seconds)
    # The nodes have judged all but what their ranks wait for.
    limited = limit_claim(verdict, job.means(), missing, unseen_where=_ELSEWHERE)
    if missing and not limited.unseen_ranks:
        words = unseen_words(missing, len(job.all) + missing, _ELSEWHERE)
        limited = replace(limited, evidence=f"{limited.evidence}; {words}", unseen_ranks=missing)
    if len(parts) > 1:
        account = None if limited.cause is Cause.HANG else job.account(on_device=on_device)
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


def _worst(run: str, parts: Sequence[NodePart], job: "_Job", *, hidden: bool) -> Verdict:
    hangs = [part for part in parts if part.verdict.cause is Cause.HANG]
    if hangs:
        return _hang(run, hangs)
    if len(parts) == 1 and not (parts[0].verdict.cause is Cause.UNKNOWN and parts[0].verdict.unseen_ranks):
        return parts[0].verdict
    found = [verdict for part in parts if (verdict := job.bounded(part)) is not None]
    late = job.lateness(run, found)
    if late is not None:
        found.append(late)
    unequal = job.imbalance(run)
    if unequal is not None:
        # A node that has seen several stages may not have seen all.
        found = [verdict for verdict in found if verdict.cause is not Cause.PIPELINE_IMBALANCE]
        found.append(unequal)
    # An unknown cause counts only if no node has found another one.
    found = found or [part.verdict for part in parts if job.is_unknown(part)]
    if found:
        return max(found, key=lambda verdict: verdict.cost_seconds_per_step)
    if not job.all:
        return parts[0].verdict
    if hidden:
        words = (
            "cannot determine which rank is slow: collectives wait on the device; no other cause takes"
            f" {MIN_CAUSE_SHARE:.0%} of a {duration(job.step_seconds)} step, on {len(parts)} nodes"
        )
        return Verdict(Cause.UNKNOWN, run, "", None, "collective_wait", words, 0.0, "")
    words = (
        f"nothing takes {MIN_CAUSE_SHARE:.0%} of a {duration(job.step_seconds)} step without need,"
        f" on {len(parts)} node{'s' if len(parts) > 1 else ''}"
    )
    return Verdict(Cause.NONE, run, "", None, "", words, 0.0, "")


class _Job:
    """The ranks of a run on all nodes, compared by own work."""

    def __init__(self, parts: Sequence[NodePart]) -> None:
        self.all = [work for part in parts for work in part.works]
        self.node_of = {work.rank: part.node for part in parts for work in part.works}
        self._parts = parts
        self._stages = {work.rank: work.stage for work in self.all}
        self._own = {work.rank: mean_own(work) for work in self.all}
        waits = [mean_wait(work) for work in self.all]
        steps = [own + wait for own, wait in zip(self._own.values(), waits, strict=True)]
        self.step_seconds = statistics.median(steps or [0.0])
        self.together = are_material([*zip(waits, steps, strict=True)])
        self.least_wait = min(waits, default=0.0)

    @cached_property
    def stragglers(self) -> list[Straggler]:
        """The ranks that the others wait for, the slowest first."""
        if not self.together:
            return []
        slowest = sorted(self.all, key=lambda work: -self._own[work.rank])
        return find_stragglers(slowest_and_peers(slowest), len(slowest))

    def bounded(self, part: NodePart) -> Verdict | None:
        """Return a node's verdict with its cost to the whole run; None if that is negligible."""
        # The node's other causes were compared on that node only: their costs do not add up with the run's.
        verdict = replace(part.verdict, others=())
        if verdict.cause in _QUIET:
            return None
        if verdict.cause in _BESIDE_STEPS:
            return verdict
        if not self.together:
            if verdict.rank is None and not self._is_of_most(verdict.cause):
                verdict = replace(verdict, evidence=f"{verdict.evidence}, on {part.node}")
            return verdict
        most = None
        if verdict.cause is Cause.COLLECTIVE:
            most = self.least_wait
        elif verdict.rank is not None:
            most = self._excess(verdict.rank)
        elif self._is_of_most(verdict.cause):
            verdict = replace(verdict, node="")
        elif verdict.cause is Cause.SCRIPT_CODE:
            return None  # Code that other nodes' ranks do not run makes a rank slow.
        elif part.works:
            latest = max(part.works, key=lambda work: self._own[work.rank]).rank
            most = self._excess(latest)
            alike = f", as on all {len(part.works)} ranks of the node" if len(part.works) > 1 else ""
            verdict = replace(verdict, node=part.node, rank=latest, evidence=f"{verdict.evidence}{alike}")
        if most is not None and most < verdict.cost_seconds_per_step:
            verdict = replace(verdict, cost_seconds_per_step=most)
        return verdict if verdict.cost_seconds_per_step >= MIN_CAUSE_SHARE * self.step_seconds else None

    def is_unknown(self, part: NodePart) -> bool:
        """Return whether a node's verdict makes the cause unknown for the whole run.

        Without a cost it does not if the node's ranks have no steps yet, which is no verdict on the others,
        or if ranks of other nodes explain it.
        """
        verdict = part.verdict
        if verdict.cause is not Cause.UNKNOWN:
            return False
        if verdict.cost_seconds_per_step or not self.all:
            return True
        is_explained = verdict.unseen_ranks or (self.together and verdict.phase in WAITING)
        return bool(part.works) and not is_explained

    def means(self) -> list[RankEvidence]:
        """Return each rank's mean step, of which only the wait for others is apart."""
        return [
            RankEvidence(
                work.rank,
                self.node_of[work.rank],
                self._own[work.rank] + mean_wait(work),
                {"forward": self._own[work.rank], "collective_wait": mean_wait(work)},
            )
            for work in self.all
        ]

    def account(self, *, on_device: bool) -> Account | None:
        """Return the account of the step of all nodes' ranks; None without steps.

        Nodes send means of blocks of steps, in which work that differs from step to step evens out. As much
        of the exchange is a wait for it as on the node that has most of it.
        """
        if not self.all:
            return None
        ranks = []
        for work in sorted(self.all, key=lambda each: each.rank):
            phases = {name: float(column.mean()) for name, column in work.phase_seconds.items()}
            node, step = self.node_of[work.rank], sum(phases.values())
            ranks.append(RankEvidence(work.rank, node, step, phases, phases if on_device else {}))
        steps = {work.rank: work for work in self.all}
        account = account_of(Walk(Job.of(ranks, None if on_device else steps), None))
        of_nodes = [part.verdict.account for part in self._parts if part.verdict.account is not None]
        uneven = max((each.share(PartKind.UNEVEN_WORK) for each in of_nodes), default=0.0)
        return _with_uneven(account, uneven * account.step_seconds)

    def lateness(self, run: str, found: Sequence[Verdict]) -> Verdict | None:
        """Return the verdict on the latest rank of which no other verdict explains at least half."""
        explained = {verdict.rank: verdict.cost_seconds_per_step for verdict in found}
        unexplained = [
            each for each in self.stragglers if explained.get(each.rank, 0.0) < each.excess_seconds / 2
        ]
        if not unexplained or unexplained[0].excess_seconds < MIN_CAUSE_SHARE * self.step_seconds:
            return None
        worst, others = unexplained[0], sorted(each.rank for each in unexplained[1:])
        words = (
            f"{duration(worst.excess_seconds)} of each {duration(self.step_seconds)} step more than its peers"
            f" on {len(self._parts)} nodes need, most of it in {worst.phase}"
        )
        if others:
            named = ", ".join(map(str, others[:_MAX_NAMED]))
            words += f"; so {'do' if len(others) > 1 else 'does'} rank {named}"
        cause = Cause.INPUT_BOUND if worst.phase == "data" else Cause.SLOW_RANK
        node = self.node_of[worst.rank]
        return Verdict(cause, run, node, worst.rank, worst.phase, words, worst.excess_seconds, "")

    def imbalance(self, run: str) -> Verdict | None:
        """Return the verdict on a pipeline whose stages work for different times."""
        late = {each.rank: each.excess_seconds for each in self.stragglers}
        found = find_imbalance(
            (work.stage, self._own[work.rank] - late.get(work.rank, 0.0), mean_wait(work))
            for work in self.all
        )
        if not found or not self.together or found.cost_seconds < MIN_CAUSE_SHARE * self.step_seconds:
            return None
        words = found.words(self.step_seconds)
        return Verdict(Cause.PIPELINE_IMBALANCE, run, "", None, "", words, found.cost_seconds, "")

    def _excess(self, rank: int) -> float | None:
        """Return the own work of a rank above its peers' median, in seconds per step; None if unknown."""
        if rank not in self._own:
            return None
        stage = self._stages[rank]
        peers = [own for other, own in self._own.items() if other != rank and self._stages[other] == stage]
        return max(0.0, self._own[rank] - float(np.median(peers))) if peers else None

    def _is_of_most(self, cause: Cause) -> bool:
        """Return whether the nodes on which all ranks share a cause have more than half of the ranks."""
        sharing = [part for part in self._parts if part.verdict.cause is cause and part.verdict.rank is None]
        return 2 * sum(len(part.works) for part in sharing) > len(self.all)


def _with_uneven(account: Account, least: float) -> Account:
    """Return the account in which uneven work takes so much at least, of what is the exchange's."""
    there = {kind: account.share(kind) * account.step_seconds for kind in _WAITS}
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
