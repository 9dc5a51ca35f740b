"""The verdicts on a run: the causes of its lost time, by what the reader gains from removing them. Pure."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from torchperfd.model.formatting import duration
from torchperfd_daemon.diagnosis.accounting import account_of
from torchperfd_daemon.diagnosis.cause_finders import find_all
from torchperfd_daemon.diagnosis.cause_table import EXPLAINED, MIN_CAUSE_SHARE, MOST_OF
from torchperfd_daemon.diagnosis.cause_walk import Finding, Walk
from torchperfd_daemon.diagnosis.detect.straggler import WAITING, RankWork
from torchperfd_daemon.diagnosis.edits import DATA
from torchperfd_daemon.diagnosis.evidence import RankEvidence, hide_waits
from torchperfd_daemon.diagnosis.job import Job
from torchperfd_daemon.diagnosis.remedies import (
    UNMEASURED,
    LoaderCounsel,
    Remedy,
    contention_remedy,
    loader_remedy,
    stage_words,
    without_fewer_workers,
)
from torchperfd_daemon.diagnosis.verdict import Cause, Verdict, next_command

Works = Mapping[int, RankWork]


def rank_causes(
    run: str,
    ranks: Sequence[RankEvidence],
    counsel: LoaderCounsel = UNMEASURED,
    works: Works | None = None,
) -> list[Verdict]:
    """Return the causes of a run's lost time, the largest gain first; the first verdict has the account.

    What a cause costs is the measured step less the replayed step without it. Costs are each for itself and
    need not sum to anything; the account sums to the step. For a run that has become slower, the costs of
    causes that come with it are what they take beyond the past, and losses that were there before and last
    are listed beside them. If less than :data:`~.cause_table.EXPLAINED` of a slowdown has a cause, a verdict
    ``UNKNOWN`` costs the rest. A lack of processors that all ranks have had since the start is the state of
    the machine: a note beside causes that the run's owner can remove.

    If nothing is lost, the only verdict is ``NONE``, or ``UNKNOWN`` for ranks whose waits the host does not
    see. Whether a job without a cause is healthy is for :func:`~.claims.limit_claim` to decide.

    Args:
        counsel: What the run is advised on its loaders.
        works: The single steps of each rank, by rank.
    """
    seen = [rank for rank in ranks if rank.step_seconds > 0]
    if not seen:
        return [Verdict(Cause.UNKNOWN, run, "", None, "", "no training step was seen", 0.0, "torchperfd ps")]
    pasts = [rank.before for rank in seen if rank.before and rank.before.step_seconds > 0]
    past = Job.of(pasts) if len(pasts) == len(seen) else None
    walk = Walk(Job.of(seen, works), past)
    found = find_all(walk)
    if past is not None:
        found = _with_lasting(seen, pasts, works, found)
    found.sort(key=lambda each: -each.cost_seconds)
    found, note = _without_state(walk, found, counsel)
    unknown = _unknown(walk)
    verdicts = [_verdict(run, seen, each, counsel) for each in found]
    if unknown is not None:
        verdicts.insert(0, _verdict(run, seen, unknown, counsel))
    verdicts = _agreeing(verdicts)
    switch = _switch(run, walk)
    if switch is not None and all(each.cause is Cause.CPU_CONTENTION for each in verdicts):
        # The state of the machine is not the owner's to change.
        verdicts.insert(0, switch)
    if not verdicts and hide_waits(seen):
        verdicts = [_cannot_compare(run, seen, walk.step)]
    if not verdicts:
        verdicts = [_nothing(run, walk)]
    verdicts[0] = replace(verdicts[0], account=account_of(walk), note=note)
    return verdicts


def _agreeing(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Return verdicts whose fixes agree: where a number of workers is advised, none says fewer."""
    has_number = any(each.phase == DATA and each.saves_seconds for each in verdicts)
    return [
        replace(each, fix=without_fewer_workers(each.fix))
        if has_number and each.cause is Cause.CPU_CONTENTION
        else each
        for each in verdicts
    ]


def _switch(run: str, walk: Walk) -> Verdict | None:
    """Return the verdict on debugging switches that are on; None without any."""
    switches = [name for name in walk.job.ranks[0].switches if not any(each in name for each in _HARMLESS)]
    if not switches:
        return None
    words = f"{' and '.join(switches)}: for debugging only, and what it costs is not measured"
    command = next_command(Cause.DEBUG_SWITCH, run)
    return Verdict(Cause.DEBUG_SWITCH, run, "", None, "", words, 0.0, command)


def _nothing(run: str, walk: Walk) -> Verdict:
    words = f"nothing takes {MIN_CAUSE_SHARE:.0%} of a {duration(walk.step)} step without need"
    if walk.usual:
        words = f"nothing stands out of a {duration(walk.step)} step: {'; '.join(walk.usual)}"
    return Verdict(Cause.NONE, run, "", None, "", words, 0.0, next_command(Cause.NONE, run))


def _without_state(walk: Walk, found: Sequence[Finding], counsel: LoaderCounsel) -> tuple[list[Finding], str]:
    """Return the findings without the machine's state, and that in words, if the owner can remove others."""
    states = [each for each in found if each.cause is Cause.CPU_CONTENTION and each.rank is None]
    others = [each for each in found if each not in states and each.cost_seconds > 0]
    if not states or not others or not walk.since_start or _remedy(states[0], walk.job.ranks, counsel).cause:
        return [*found], ""
    queued = statistics.median(rank.queued_seconds for rank in walk.job.ranks)
    served = max(walk.step - queued, MIN_CAUSE_SHARE * walk.step)
    if served <= 0:
        return [*found], ""
    note = (
        f"busy node: everything takes {walk.step / served:.1f} times as long; with the CPUs to itself, a step"
        f" would take {duration(served)} in place of {duration(walk.step)}"
    )
    return [each for each in found if each not in states], note


def _with_lasting(
    seen: Sequence[RankEvidence], pasts: Sequence[RankEvidence], works: Works | None, found: list[Finding]
) -> list[Finding]:
    """Return the causes of a slowdown with the losses that all ranks had before it, too.

    A slowdown of a few percent must not hide that most of the step waits for data.
    """
    then = {each.cause for each in find_all(Walk(Job.of(pasts), None)) if each.rank is None and each.lasts}
    if not then:
        return found
    now = find_all(Walk(Job.of([replace(rank, before=None) for rank in seen], works), None))
    for lasting in now:
        if lasting.cause not in then or lasting.rank is not None or not lasting.lasts:
            continue
        same = next((each for each in found if each.cause is lasting.cause), None)
        if same is not None and same.rank is not None:
            continue
        if same is not None:
            more = f", {duration(same.cost_seconds)} of it more than before"
            lasting = replace(lasting, words=f"{lasting.words}{more}", has_grown=True)
        found = [*(each for each in found if each is not same), lasting]
    return found


def _unknown(walk: Walk) -> Finding | None:
    """Return a slowdown that is mostly unexplained, with the phase that has grown most."""
    slowed = [
        (rank.step_seconds - rank.before.step_seconds, rank, rank.before)
        for rank in walk.job.ranks
        if rank.before
    ]
    if not slowed:
        return None
    slower, rank, before = max(slowed, key=lambda each: each[0])
    unexplained = walk.growth
    if slower < MIN_CAUSE_SHARE * walk.step or unexplained <= (1 - EXPLAINED) * slower:
        return None
    if any(each.cause is Cause.CPU_CONTENTION for each in walk.found):
        # The wait of the ranks' other threads for a processor is not measured and may be the rest.
        return None
    knock_on = _knock_on(slowed, slower, walk)
    unexplained -= knock_on
    own = {name: seconds for name, seconds in rank.phase_seconds.items() if name not in WAITING}
    phase = max(own, key=lambda name: own[name] - before.phase_seconds.get(name, 0.0), default="")
    words = (
        f"steps take {duration(slower)} more than before, {duration(unexplained)} of it without a known cause"
    )
    words += f", and {duration(knock_on)} in exchanges that have grown with it" if knock_on else ""
    words += f"; {phase} has grown most" if phase else ""
    cause = Cause.UNKNOWN
    switches = [name for name in rank.switches if name not in before.switches]
    if switches:
        cause, words = Cause.DEBUG_SWITCH, f"{words}; since then, {' and '.join(switches)}"
    return Finding(cause, rank, None, phase, unexplained, words, lambda model: model, has_grown=True)


def _knock_on(slowed: Sequence[tuple[float, RankEvidence, RankEvidence]], slower: float, walk: Walk) -> float:
    """Return the part of a slowdown that is in exchanges if most of it is in the ranks' own work; else 0.

    Ranks that all work longer also arrive less evenly by chance, which makes exchanges longer. Less than
    :data:`MIN_SHARE` of the slowdown counts as 0.

    Args:
        slowed: For each rank the growth of its step, its evidence and its past.
    """
    own = statistics.median(rank.own_seconds - past.own_seconds for _, rank, past in slowed)
    exchange = sum(each.cost_seconds for each in walk.found if each.cause is Cause.COLLECTIVE)
    beyond = slower - own - exchange
    return beyond if own >= MOST_OF * slower and beyond >= MIN_CAUSE_SHARE * slower else 0.0


_APART: Final = 1.5
# Switches that scripts leave on by choice, for results that repeat.
_HARMLESS: Final = ("deterministic", "PYTHONMALLOC")


def _remedy(found: Finding, seen: Sequence[RankEvidence], counsel: LoaderCounsel) -> Remedy:
    """Return what the evidence says to change; an empty one for what is usual."""
    rank = found.where
    ranks = max(len(seen), rank.world_size)
    if found.cause is Cause.CPU_CONTENTION:
        return contention_remedy(
            rank.loader,
            rank.threads,
            cpus=rank.cpus,
            binding=rank.binding,
            on_device=rank.on_device,
            ranks=ranks,
        )
    if found.cause is Cause.INPUT_BOUND:
        remedy = loader_remedy(
            rank.loader,
            rank.step_seconds,
            rank.phase_seconds.get(DATA, 0.0),
            counsel,
            most_seconds=found.cost_seconds or math.inf,
            on_device=rank.device_busy is not None,
            ranks=ranks,
            binding=rank.binding,
        )
        waited = rank.phase_seconds.get(DATA, 0.0)
        starts = rank.workers_respawn and rank.epoch_start_seconds >= EXPLAINED * waited
        return replace(remedy, cause=Cause.EPOCH_START) if starts and remedy.cause is None else remedy
    is_called = rank.called_collection_seconds >= EXPLAINED * rank.collected_seconds
    if found.cause is Cause.GARBAGE_COLLECTION and rank.collect_line and is_called:
        return Remedy(f"call gc.collect() less often: {rank.collect_line} does in the loop")
    if found.cause is Cause.RECOMPILATION and rank.graph_limit_reached:
        where = rank.graph_limit_function or "a function"
        return Remedy(
            f"torch.compile(model, dynamic=True): {where} has reached the limit of recompilations and runs"
            " without torch.compile since"
        )
    return Remedy()


def _verdict(run: str, seen: Sequence[RankEvidence], found: Finding, counsel: LoaderCounsel) -> Verdict:
    remedy = _remedy(found, seen, counsel)
    cause = remedy.cause or found.cause
    words = found.words
    if found.cause is Cause.INPUT_BOUND:
        words += stage_words(found.where.loader)
    elif found.cause is Cause.GARBAGE_COLLECTION and _collect_apart(found, seen):
        words += ", because ranks collect at different steps and wait for each other"
    elif found.cause is Cause.INTERPRETER_LOCK and found.where.blocked_by:
        words += f", most often {found.where.blocked_by}"
    return Verdict(
        cause,
        run,
        found.where.node,
        found.rank,
        found.phase,
        words,
        found.cost_seconds,
        next_command(cause, run),
        has_grown=found.has_grown,
        stages=found.where.loader.stages if found.phase == DATA and found.where.loader else None,
        fix=remedy.fix,
        saves_seconds=remedy.saves_seconds,
    )


def _collect_apart(found: Finding, seen: Sequence[RankEvidence]) -> bool:
    """Return whether collections cost more than any rank collects: each one delays all ranks."""
    longest = max(rank.collected_seconds for rank in seen)
    return seen[0].collects_apart or found.cost_seconds >= _APART * longest


def _cannot_compare(run: str, ranks: Sequence[RankEvidence], step_seconds: float) -> Verdict:
    longest = max(rank.wait_seconds for rank in ranks)
    waits = f"ranks wait for {duration(longest)} of" if longest else "no wait for another rank is seen in"
    words = (
        f"cannot determine which rank is slow: {waits} each {duration(step_seconds)} step, as far as"
        f" devices show it; no other cause takes {MIN_CAUSE_SHARE:.0%} of it"
    )
    return Verdict(
        Cause.UNKNOWN, run, "", None, "collective_wait", words, 0.0, next_command(Cause.UNKNOWN, run)
    )
