"""Decides what may be claimed about a job: from which of its ranks, and from which account of a step. Pure.

A healthy job is a claim about all its ranks and about the whole step. The live verdict, the verdict after the
end of a run and the one of several nodes are all limited by :func:`limit_claim`.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Final, NamedTuple

import numpy as np

from torchperfd.model.formatting import duration
from torchperfd.model.step_account import Account, PartKind
from torchperfd_daemon.diagnosis.detect.straggler import WAITING
from torchperfd_daemon.diagnosis.edits import DATA
from torchperfd_daemon.diagnosis.evidence import RankEvidence
from torchperfd_daemon.diagnosis.step_model import Float64
from torchperfd_daemon.diagnosis.verdict import Cause, Verdict, of_step

WAIT_SHARE: Final = 0.2
"""No run is healthy if it waits for data, for other ranks or for a lock for this share of its step."""
EXCHANGE_SHARE: Final = 0.35
"""No run is healthy if its ranks spend this share of its step in collectives, waits included."""
SAID_SHARE: Final = 0.1
"""From this share of the step on, a healthy run's evidence has its exchange."""
QUEUED_SHARE: Final = 0.3
"""No run is healthy if it waits for a CPU for this share of its step: below it, contention is no cause."""
UNNAMED_SHARE: Final = 0.2
"""No run is healthy if this share of its step is in no part that diagnosis can judge."""
LONG_STEPS: Final = 1.5
"""No run is healthy if its mean step is this many times as long as 95 % of its newest steps are at most..."""
FAR_LONGER: Final = 3.0
"""...or if steps longer than so many medians have :data:`UNNAMED_SHARE` of the time beyond the median."""
_LATE_ELSEWHERE: Final = 0.05
"""A wait in collectives below this share of the step is no sign of a slow rank elsewhere."""

# These are about waits of the ranks, or about no step.
_OF_WAITS: Final = frozenset(
    {Cause.COLLECTIVE, Cause.PIPELINE_IMBALANCE, Cause.SLOW_RANK, Cause.HANG, Cause.UNKNOWN}
)
_COMPUTES: Final = frozenset({"forward", "backward", "optimizer"})
# On a device, the loss is a computation: the host's own code is not in the device's times.
_COMPUTES_ON_DEVICE: Final = _COMPUTES | {"loss"}
_UNSEEN_FORWARD: Final = (
    "the model's forward is not seen (its methods are called): use attach(model=…) or client.phase()"
)


class _Doubt(NamedTuple):
    """A reason why nothing may be called healthy."""

    share: float
    phase: str
    words: str


def limit_claim(
    verdict: Verdict,
    ranks: Sequence[RankEvidence],
    unseen: int = 0,
    *,
    newest: Float64 | None = None,
    unseen_where: str = "not seen by this daemon",
) -> Verdict:
    """Return a verdict that claims no more than was seen.

    A run is healthy only if all ranks of its job were seen and none of them spends a large part of its step
    waiting or in a part that diagnosis cannot judge. Otherwise the cause is unknown, and the evidence names
    the largest such part. Other verdicts than ``none`` stay; to the evidence of a cause of all ranks alike, a
    long wait of the ranks for each other is added, unless the account has it.

    Args:
        unseen: The number of the job's other ranks.
        newest: The newest steps of the slowest rank, in seconds; shape (steps,).
        unseen_where: Where the other ranks are, in words that follow "are".
    """
    seen = [rank for rank in ranks if rank.step_seconds > 0 and rank.phase_seconds]
    account = verdict.account
    if verdict.cause is not Cause.NONE or not seen:
        is_said = account is not None or unseen > 0 or not _is_of_all(verdict)
        waits = None if len(seen) < 2 or is_said else _ranks(seen)
        return replace(verdict, evidence=f"{verdict.evidence}; {waits.words}") if waits else verdict
    is_apart = account is not None and _tells_waits_apart(account)
    if account is not None and len(seen) > 1 and (is_apart or _waits_at_most(seen) < WAIT_SHARE):
        exchange = account.share(PartKind.EXCHANGE)
        said = f"; exchange takes {exchange:.0%}" if exchange >= SAID_SHARE else ""
        verdict = replace(verdict, evidence=f"{verdict.evidence}{said}")
    doubts = _doubts(seen, account if is_apart else None, unseen, newest)
    if doubts:
        words = "; ".join(doubt.words for doubt in doubts)
        verdict = replace(verdict, cause=Cause.UNKNOWN, phase=doubts[0].phase, evidence=words)
    return _of_part(verdict, seen, unseen, unseen_where) if unseen > 0 else verdict


def _is_of_all(verdict: Verdict) -> bool:
    return verdict.rank is None and verdict.phase != "collective_wait" and verdict.cause not in _OF_WAITS


def _tells_waits_apart(account: Account) -> bool:
    """Return whether an account is of single steps, in which the exchange shows beside uneven work."""
    return any(part.kind is PartKind.UNEVEN_WORK for part in account.parts)


def _doubts(
    seen: Sequence[RankEvidence], account: Account | None, unseen: int, newest: Float64 | None
) -> list[_Doubt]:
    """Return the largest doubt, and that on long steps, which are named beside what they consist of.

    Args:
        account: The account of the step, if that has the waits apart.
    """
    data, *others = (_largest(seen, rule) for rule in _RULES)
    # What ranks wait for may be a rank that is not seen.
    waits = None if unseen > 0 else _parted_waits(account) if account else _ranks(seen)
    found = [doubt for doubt in (data, waits, *others, _no_computation(seen)) if doubt is not None]
    # Of equal shares the first is the more precise one.
    largest = sorted(found, key=lambda doubt: -doubt.share)[:1]
    return [*largest, *_long_steps(seen, newest)]


def unseen_words(unseen: int, world: int, where: str = "not seen by this daemon") -> str:
    """Return that some of a job's ranks were not seen.

    Args:
        world: How many ranks the job has.
        where: Where they are, in words that follow "are".
    """
    return f"{unseen} of the job's {world} ranks {'is' if unseen == 1 else 'are'} {where}"


def _of_part(verdict: Verdict, seen: Sequence[RankEvidence], unseen: int, where: str) -> Verdict:
    """Return the verdict on the seen part of a job: a slow rank may be among the others."""
    missing = unseen_words(unseen, len(seen) + unseen, where)
    if verdict.cause is Cause.UNKNOWN:
        return replace(verdict, evidence=f"{verdict.evidence}; {missing}")
    shortest = min(seen, key=attrgetter("wait_seconds"))
    if shortest.wait_seconds >= _LATE_ELSEWHERE * shortest.step_seconds:
        waited, step = duration(shortest.wait_seconds), duration(shortest.step_seconds)
        words = f"all ranks here wait in collectives for {waited} of each {step} step, and {missing}"
    else:
        words = f"{missing}; of those here, {verdict.evidence}"
    return replace(
        verdict,
        cause=Cause.UNKNOWN,
        phase="",
        evidence=words,
        next_command="torchperfd diagnose --fleet",
        unseen_ranks=unseen,
    )


def _account(rank: RankEvidence) -> Mapping[str, float]:
    """Return where a step goes: on the device, which works while the host waits, or else on the host.

    Empty for a device without such times that works nearly all the time: what its host does costs nothing.
    """
    if rank.device_phase_seconds:
        return rank.device_phase_seconds
    is_busy = rank.device_busy is not None and rank.device_busy >= 1 - UNNAMED_SHARE
    return {} if is_busy else rank.phase_seconds


class _Rule(NamedTuple):
    """From which share of a rank's step on a time is a doubt, in which words; these differ for ``other``."""

    least: float
    phase: str
    measure: Callable[[RankEvidence], float]
    words: str = ""


_RULES: Final = (
    _Rule(
        WAIT_SHARE,
        DATA,
        lambda rank: _account(rank).get(DATA, 0.0),
        "waiting for data takes {part}, and no setting is known to shorten it",
    ),
    _Rule(
        WAIT_SHARE,
        "",
        lambda rank: rank.blocked_seconds,
        "for {part} the training thread stands still in phases in which it should compute, while other"
        " threads of the process run: one of them may hold Python's interpreter lock",
    ),
    _Rule(
        QUEUED_SHARE,
        "",
        lambda rank: rank.queued_seconds if _account(rank) else 0.0,
        "for {part} the training thread is ready to run and has no CPU",
    ),
    _Rule(UNNAMED_SHARE, "other", lambda rank: _account(rank).get("other", 0.0)),
)


def _largest(seen: Sequence[RankEvidence], rule: _Rule) -> _Doubt | None:
    """Return the doubt on the rank of whose step a time is the largest share."""
    rank = max(seen, key=lambda each: rule.measure(each) / each.step_seconds)
    seconds = rule.measure(rank)
    share = seconds / rank.step_seconds
    if share < rule.least:
        return None
    words = rule.words or _unnamed_words(rank)
    return _Doubt(share, rule.phase, words.format(part=_part(seconds, rank.step_seconds)))


def _unnamed_words(rank: RankEvidence) -> str:
    if rank.forward_unseen:
        return "{part} is in no phase: " + _UNSEEN_FORWARD
    if rank.device_phase_seconds:
        return "for {part} the device is in no phase of the model: it waits for the script's own code"
    return "{part} is in no phase: the script's own code, or work that is not recorded"


def _part(seconds: float, step_seconds: float) -> str:
    return f"{of_step(seconds, step_seconds)} ({seconds / step_seconds:.0%})"


def _ranks(seen: Sequence[RankEvidence]) -> _Doubt | None:
    rank = max(seen, key=lambda each: each.wait_seconds / each.step_seconds)
    share = rank.wait_seconds / rank.step_seconds
    if share < WAIT_SHARE or (share < EXCHANGE_SHARE and _waits_at_most(seen) < WAIT_SHARE):
        return None
    words = f"{_part(rank.wait_seconds, rank.step_seconds)} is waiting in collectives"
    if len(seen) > 1:
        least = min(each.wait_seconds / each.step_seconds for each in seen)
        words += f" on rank {rank.rank}, and at least {least:.0%} on all ranks: {_why_ranks_wait(seen)}"
    return _Doubt(share, "collective_wait", words)


def _waits_at_most(seen: Sequence[RankEvidence]) -> float:
    """Return the largest share of the step that devices can spend waiting for ranks that are not there yet.

    Of n numbers with standard deviations of at most s, the largest is on average at most s √(n - 1) above the
    largest mean, whatever their distribution and however they depend on each other (Arnold and Groeneveld,
    1979). Infinite where single steps of a device are not known.
    """
    own = [each.own_seconds for each in seen]
    deviations = [math.inf if (each := rank.own_deviation_seconds) is None else each for rank in seen]
    late, uneven = max(own) - statistics.fmean(own), max(deviations) * math.sqrt(len(seen) - 1)
    return (late + uneven) / max(rank.step_seconds for rank in seen)


def _parted_waits(account: Account) -> _Doubt | None:
    """Return a doubt on ranks that wait for each other, or on a long exchange."""
    step = account.step_seconds
    late, uneven = account.share(PartKind.LATE_RANK), account.share(PartKind.UNEVEN_WORK)
    exchange = account.share(PartKind.EXCHANGE)
    if late + uneven >= WAIT_SHARE:
        words = _part((late + uneven) * step, step)
        if uneven >= late:
            words += " is waiting for ranks whose work differs from step to step; no rank is slow by itself"
        else:
            words += " is waiting for a rank that works longer than its peers, which may be chance"
        return _Doubt(late + uneven, "collective_wait", words)
    waited = late + uneven + exchange
    if waited < EXCHANGE_SHARE:
        return None
    of_it = f", {duration(exchange * step)} of it" if waited > exchange else ""
    words = f"collectives take {_part(waited * step, step)}{of_it} after the last rank has arrived"
    return _Doubt(waited, "collective_wait", words)


def _why_ranks_wait(seen: Sequence[RankEvidence]) -> str:
    own = sorted(each.own_seconds for each in seen)
    slowest = max(seen, key=attrgetter("own_seconds"))
    more = own[-1] - statistics.median(own[:-1])
    if more >= _LATE_ELSEWHERE * slowest.step_seconds:
        return f"rank {slowest.rank} works {duration(more)} longer than its peers, which may be chance"
    return "no rank is slow by itself; their work differs from step to step, or the exchange takes this long"


def _no_computation(seen: Sequence[RankEvidence]) -> _Doubt | None:
    """Return a doubt if the largest part of the longest step's own work is no computation of the model."""
    slowest = max(seen, key=attrgetter("step_seconds"))
    account = {name: seconds for name, seconds in _account(slowest).items() if name not in WAITING}
    phase = max(account, key=lambda name: account[name], default="forward")
    computes = _COMPUTES_ON_DEVICE if slowest.device_phase_seconds else _COMPUTES
    if phase in computes:
        return None
    part = _part(account[phase], slowest.step_seconds)
    words = f"{phase} is the largest part, {part}, and is no computation of the model"
    return _Doubt(account[phase] / slowest.step_seconds, phase, words)


def _long_steps(seen: Sequence[RankEvidence], newest: Float64 | None) -> list[_Doubt]:
    """Return the doubt that few steps have much of the time, if they do: no cause is known for them."""
    if newest is None or not len(newest):
        return []
    mean = max(rank.step_seconds for rank in seen)
    ordered = np.sort(newest)
    median, p95 = (ordered[math.ceil(share * len(ordered)) - 1] for share in (0.5, 0.95))
    if mean >= LONG_STEPS * p95:
        words = (
            f"most of the time is in a few long steps: the mean is {duration(mean)}, and 95% of the newest"
            f" steps take at most {duration(p95)}"
        )
        return [_Doubt(1 - p95 / mean, "", words)]
    long = newest[newest > FAR_LONGER * median]
    share = float((long - median).sum() / newest.sum())
    if share < UNNAMED_SHARE:
        return []
    words = (
        f"{share:.0%} of the time is in {len(long)} of the newest {len(newest)} steps, which take"
        f" {duration(float(long.mean()))} on average, with a median of {duration(median)}"
    )
    return [_Doubt(share, "", words)]
