"""The verdicts on a run: the causes of its lost time, by what the reader gains from removing them. Pure."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from torchperfd.model.formatting import duration
from torchperfd_daemon.diagnosis.accounting import account_of
from torchperfd_daemon.diagnosis.cause_finders import find_all
from torchperfd_daemon.diagnosis.cause_table import EXPLAINED, MIN_CAUSE_SHARE, MOST_OF
from torchperfd_daemon.diagnosis.cause_walk import Finding, Walk
from torchperfd_daemon.diagnosis.claims import limit_claim
from torchperfd_daemon.diagnosis.detect.straggler import WAITING, RankWork
from torchperfd_daemon.diagnosis.edits import DATA, both
from torchperfd_daemon.diagnosis.evidence import RankEvidence, could_have_found, hide_waits
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
from torchperfd_daemon.diagnosis.step_model import Float64
from torchperfd_daemon.diagnosis.verdict import Cause, Verdict, capture_command, next_command

Works = Mapping[int, RankWork]

MIN_STEPS: Final = 20
"""With fewer steps, no run is called healthy by its mean step..."""
MIN_LONG_STEPS: Final = 8
"""...or with fewer than this, if they have taken ten seconds."""
_LONG_S: Final = 10.0
_NO_STEPS: Final[Float64] = np.zeros(0)
# What a run does in its first seconds says little about these: windows of steps decide on others.
_KNOWN_EARLY: Final = frozenset({DATA, "loss", "other"})
_APART: Final = 1.5
# Switches that scripts leave on by choice, for results that repeat.
_HARMLESS: Final = ("deterministic", "PYTHONMALLOC")


def rank_causes(
    run: str, ranks: Sequence[RankEvidence], counsel: LoaderCounsel = UNMEASURED, works: Works | None = None
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
        return [_no_step(run)]
    pasts = [rank.before for rank in seen if rank.before and rank.before.step_seconds > 0]
    walk = Walk(Job.of(seen, works), Job.of(pasts) if len(pasts) == len(seen) else None)
    find_all(walk)
    found = _with_lasting(walk)
    found.sort(key=lambda each: -each.cost_seconds)
    found, note = _without_state(walk, found, counsel)
    verdicts = _agreeing([_verdict(run, walk, each, counsel) for each in (*_unknown(walk), *found)])
    if all(each.cause is Cause.CPU_CONTENTION for each in verdicts):
        # The state of the machine is not the owner's to change.
        verdicts = [*_switch(run, walk), *verdicts]
    if not verdicts:
        verdicts = [_cannot_compare(run, walk) if hide_waits(seen) else _nothing(run, walk)]
    verdicts[0] = replace(verdicts[0], account=account_of(walk), note=note)
    return verdicts


def _no_step(run: str) -> Verdict:
    evidence = "no training step was seen"
    return Verdict(Cause.UNKNOWN, run, evidence=evidence, next_command="torchperfd ps")


def _with_lasting(walk: Walk) -> list[Finding]:
    """Return the causes of a slowdown with the losses that all ranks had before it, too.

    A slowdown of a few percent must not hide that most of the step waits for data.
    """
    found = walk.found
    if walk.past is None:
        return found
    then = {each.cause for each in find_all(Walk(walk.past, None)) if each.rank is None and each.lasts}
    if not then:
        return found
    job = replace(walk.job, ranks=tuple(replace(rank, before=None) for rank in walk.ranks))
    for lasting in find_all(Walk(job, None)):
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


def _without_state(walk: Walk, found: list[Finding], counsel: LoaderCounsel) -> tuple[list[Finding], str]:
    """Return the findings without the machine's state, and that in words, if the owner can remove others."""
    states = [each for each in found if each.cause is Cause.CPU_CONTENTION and each.rank is None]
    others = [each for each in found if each not in states and each.cost_seconds > 0]
    if not states or not others or not walk.since_start or _remedy(walk, states[0], counsel).cause:
        return found, ""
    queued = statistics.median(rank.queued_seconds for rank in walk.ranks)
    served = max(walk.step - queued, walk.least)
    if served <= 0:
        return found, ""  # steps too short for a number to hold a part of one
    note = (
        f"busy node: everything takes {walk.step / served:.1f} times as long; with the CPUs to itself, a step"
        f" would take {duration(served)} in place of {duration(walk.step)}"
    )
    return [each for each in found if each not in states], note


def _unknown(walk: Walk) -> list[Finding]:
    """Return a slowdown that is mostly unexplained, if there is one, with the phase that has grown most."""
    slowed = [(rank, rank.before) for rank in walk.ranks if rank.before]
    if not slowed:
        return []
    rank, before = max(slowed, key=lambda each: each[0].step_seconds - each[1].step_seconds)
    slower, unexplained = rank.step_seconds - before.step_seconds, walk.growth
    # The wait of the ranks' other threads for a processor is not measured and may be the rest.
    if slower < walk.least or unexplained <= (1 - EXPLAINED) * slower or walk.is_state_hidden:
        return []
    knock_on = _knock_on(walk, slower)
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
    return [Finding(cause, rank, None, unexplained, words, both(), phase, has_grown=True)]


def _knock_on(walk: Walk, slower: float) -> float:
    """Return the part of a slowdown that is in exchanges if most of it is in the ranks' own work; else 0.

    Ranks that all work longer also arrive less evenly by chance, which makes exchanges longer. Less than
    :data:`MIN_CAUSE_SHARE` of the slowdown counts as 0.
    """
    own = statistics.median(rank.own_seconds - rank.before.own_seconds for rank in walk.ranks if rank.before)
    exchange = sum(each.cost_seconds for each in walk.found if each.cause is Cause.COLLECTIVE)
    beyond = slower - own - exchange
    return beyond if own >= MOST_OF * slower and beyond >= MIN_CAUSE_SHARE * slower else 0.0


def _agreeing(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Return verdicts whose fixes agree: where a number of workers is advised, none says fewer."""
    has_number = any(each.phase == DATA and each.saves_seconds for each in verdicts)
    return [
        replace(each, fix=without_fewer_workers(each.fix))
        if has_number and each.cause is Cause.CPU_CONTENTION
        else each
        for each in verdicts
    ]


def _switch(run: str, walk: Walk) -> list[Verdict]:
    """Return the verdict on debugging switches that are on, if there are any."""
    switches = [name for name in walk.ranks[0].switches if not any(each in name for each in _HARMLESS)]
    if not switches:
        return []
    words = f"{' and '.join(switches)}: for debugging only, and what it costs is not measured"
    command = next_command(Cause.DEBUG_SWITCH, run)
    return [Verdict(Cause.DEBUG_SWITCH, run, evidence=words, next_command=command)]


def _nothing(run: str, walk: Walk) -> Verdict:
    words = f"nothing takes {MIN_CAUSE_SHARE:.0%} of a {duration(walk.step)} step without need"
    if walk.usual:
        words = f"nothing stands out of a {duration(walk.step)} step: {'; '.join(walk.usual)}"
    return Verdict(Cause.NONE, run, evidence=words, next_command=next_command(Cause.NONE, run))


def _cannot_compare(run: str, walk: Walk) -> Verdict:
    longest = max(rank.wait_seconds for rank in walk.ranks)
    waits = f"ranks wait for {duration(longest)} of" if longest else "no wait for another rank is seen in"
    words = (
        f"cannot determine which rank is slow: {waits} each {duration(walk.step)} step, as far as"
        f" devices show it; no other cause takes {MIN_CAUSE_SHARE:.0%} of it"
    )
    command = next_command(Cause.UNKNOWN, run)
    return Verdict(Cause.UNKNOWN, run, phase="collective_wait", evidence=words, next_command=command)


def _verdict(run: str, walk: Walk, found: Finding, counsel: LoaderCounsel) -> Verdict:
    remedy, where = _remedy(walk, found, counsel), found.where
    cause = remedy.cause or found.cause
    words = found.words
    if found.cause is Cause.INPUT_BOUND:
        words += stage_words(where.loader)
    elif found.cause is Cause.GARBAGE_COLLECTION and _collect_apart(walk, found):
        words += ", because ranks collect at different steps and wait for each other"
    elif found.cause is Cause.INTERPRETER_LOCK and where.blocked_by:
        words += f", most often {where.blocked_by}"
    return Verdict(
        cause,
        run,
        where.node,
        found.rank,
        found.phase,
        words,
        found.cost_seconds,
        next_command(cause, run),
        has_grown=found.has_grown,
        stages=where.loader.stages if found.phase == DATA and where.loader else None,
        fix=remedy.fix,
        saves_seconds=remedy.saves_seconds,
    )


def _collect_apart(walk: Walk, found: Finding) -> bool:
    """Return whether collections cost more than any rank collects: each one delays all ranks."""
    longest = max(rank.collected_seconds for rank in walk.ranks)
    return walk.ranks[0].collects_apart or found.cost_seconds >= _APART * longest


def _remedy(walk: Walk, found: Finding, counsel: LoaderCounsel) -> Remedy:
    """Return what the evidence says to change; an empty one for what is usual."""
    rank = found.where
    ranks = max(len(walk.ranks), rank.world_size)
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
        waited = rank.phase_seconds.get(DATA, 0.0)
        remedy = loader_remedy(
            rank.loader,
            rank.step_seconds,
            waited,
            counsel,
            most_seconds=found.cost_seconds or math.inf,
            on_device=rank.device_busy is not None,
            ranks=ranks,
            binding=rank.binding,
        )
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


def diagnose(
    run: str,
    ranks: Sequence[RankEvidence],
    counsel: LoaderCounsel = UNMEASURED,
    works: Works | None = None,
    *,
    has_ended: bool = False,
    newest: Float64 = _NO_STEPS,
) -> Verdict:
    """Return the verdict on a run from its ranks' mean steps, for a run of which no other one is published.

    While the run goes on, only those causes count that show in data, loss and ``other``; with fewer than
    :data:`MIN_STEPS` steps only a wait for data. Without any, it is unknown while one could still be found.

    Args:
        ranks: All ranks of the job that are known here.
        has_ended: Whether the run makes no more steps, in which a cause could still be found.
        newest: The newest steps of the slowest rank, in seconds; shape (steps,).
    """
    seen = [rank for rank in ranks if rank.steps and rank.step_seconds > 0]
    if not seen:
        return _no_step(run)
    unseen = max(rank.world_size for rank in ranks) - len({rank.rank for rank in seen})
    slowest = max(seen, key=lambda rank: rank.step_seconds)
    unknown = Verdict(Cause.UNKNOWN, run, slowest.node, next_command=capture_command(run))
    if not slowest.phase_seconds:
        words = f"a step takes {duration(slowest.step_seconds)}, and its phases were not recorded"
        return replace(unknown, evidence=words)
    verdicts = rank_causes(run, seen, counsel, works)
    found = _known_by_means(verdicts, seen, has_ended=has_ended)
    if found:
        first, *others = (replace(each, step_seconds=slowest.step_seconds, account=None) for each in found)
        first = replace(first, others=tuple(others), account=verdicts[0].account)
        return limit_claim(first, seen, unseen)
    may_change = not has_ended and not could_have_found(slowest.steps, slowest.step_seconds)
    if may_change or not _has_enough(slowest):
        words = f"too early: {slowest.steps} {'step' if slowest.steps == 1 else 'steps'}"
        words += f" after the first; a verdict needs {MIN_STEPS}" if has_ended else " so far"
        return replace(unknown, evidence=words)
    return limit_claim(_with_longest(verdicts[0], slowest), seen, unseen, newest=newest)


def _known_by_means(
    verdicts: Sequence[Verdict], seen: Sequence[RankEvidence], *, has_ended: bool
) -> list[Verdict]:
    """Return the causes that the mean steps of a run show."""
    found = [each for each in verdicts if each.cause not in (Cause.NONE, Cause.UNKNOWN)]
    are_enough = all(map(_has_enough, seen))
    if has_ended and are_enough:
        return found
    return [each for each in found if each.phase in (_KNOWN_EARLY if are_enough else (DATA,))]


def _with_longest(verdict: Verdict, slowest: RankEvidence) -> Verdict:
    """Return a verdict without a cause with the longest phase of the slowest rank, unless it is unknown."""
    if verdict.cause is Cause.UNKNOWN:
        return verdict
    step = slowest.step_seconds
    shares = {name: seconds / step for name, seconds in slowest.phase_seconds.items()}
    phase = max(shares, key=lambda name: shares[name])
    words = f"{phase} is {shares[phase]:.0%} of a {duration(step)} step, data {shares.get(DATA, 0.0):.0%}"
    command = capture_command(verdict.run)
    evidence = f"nothing stands out: {words}"
    return replace(verdict, node=slowest.node, phase=phase, evidence=evidence, next_command=command)


def _has_enough(rank: RankEvidence) -> bool:
    """Return whether a mean step says more than how a run starts."""
    long_enough = rank.steps * rank.step_seconds >= _LONG_S
    return rank.steps >= (MIN_LONG_STEPS if long_enough else MIN_STEPS)
