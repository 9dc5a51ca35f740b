"""Finds the causes of a run's lost time in its evidence, the costliest first."""

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from torchperfd.durations import duration
from torchperfd_daemon.diagnosis.attribution import (
    EXPLAINED,
    LEAST_SHARE,
    MOST_OF,
    CauseAttribution,
    Measure,
)
from torchperfd_daemon.diagnosis.detect.straggler import WAITING
from torchperfd_daemon.diagnosis.evidence import RankEvidence, hide_waits
from torchperfd_daemon.diagnosis.idle_devices import device_work
from torchperfd_daemon.diagnosis.remedies import (
    UNMEASURED,
    LoaderCounsel,
    contention_remedy,
    without_fewer_workers,
)
from torchperfd_daemon.diagnosis.script_code import WORDS, script_code_phase
from torchperfd_daemon.diagnosis.verdict import (
    INPUT_BOUND_SHARE,
    SCRIPT_CODE_SHARE,
    Cause,
    Verdict,
    next_command,
)

_Measured = tuple[Cause, str, str, Measure]
_CONTENTION: Final[_Measured] = (
    Cause.CPU_CONTENTION,
    "",
    "ready to run without a processor",
    lambda each: _unserved(each),
)

# Causes with a measured time. If two claim the same time, the earlier one gets it: a throttled rank also
# waits for the processor, and so does a rank with more work, such as garbage collections.
_MEASURED: Final[tuple[_Measured, ...]] = (
    (
        Cause.CGROUP_THROTTLING,
        "",
        "held back by the control group's CPU quota",
        lambda each: each.throttled_seconds,
    ),
    (Cause.GARBAGE_COLLECTION, "", "in Python's garbage collector", lambda each: each.collected_seconds),
    (Cause.RECOMPILATION, "", "compiling graphs again", lambda each: each.compiled_seconds),
    (
        Cause.CHECKPOINT,
        "checkpoint",
        "writing checkpoints",
        lambda each: each.checkpoint_seconds + each.background_save_seconds,
    ),
    (Cause.SLOW_IO, "data", "stalled for disk or network storage", lambda each: _stored(each)),
    (Cause.MEMORY_PRESSURE, "", "stalled for memory", lambda each: each.reclaim_seconds),
    _CONTENTION,
    (
        Cause.GPU_THROTTLING,
        "",
        "lost to a device clock lowered by power or heat",
        lambda each: device_work(each) * each.device_throttled * each.device_slowdown,
    ),
    (
        Cause.GPU_SHARED,
        "",
        "lost to other processes on the device",
        lambda each: device_work(each) * each.device_shared,
    ),
)

# Losses of all ranks that are reported although they were there before a slowdown: the phase, the share of
# the step from which it counts, and the causes.
_LASTING: Final = (
    ("data", INPUT_BOUND_SHARE, frozenset({Cause.INPUT_BOUND, Cause.SLOW_IO})),
    ("other", SCRIPT_CODE_SHARE, frozenset({Cause.SCRIPT_CODE})),
    ("loss", SCRIPT_CODE_SHARE, frozenset({Cause.SCRIPT_CODE})),
)

_BESIDE: Final = "lost beside checkpoints that are saved in the background"

_APART: Final = ", because ranks collect at different steps and wait for each other"


def rank_causes(run: str, ranks: Sequence[RankEvidence], cost: LoaderCounsel = UNMEASURED) -> list[Verdict]:
    """Return the causes of a run's lost time, the costliest first.

    The cost of a cause is its time beyond a reference: the same rank's past if the run has become slower,
    else the others' median if it affects one rank. A rank is named unless the median of the others reaches
    half of its loss, or the larger share that some causes need. If ranks wait for each other, one rank's loss
    costs the run only as much as the rank is late. Lateness that no cause claims is attributed to the rank
    itself.

    Causes with a measured time come first, and their time is subtracted from the phases. A lack of processors
    on all ranks since the start precedes them. Costs sum to no more than the step. Time that all ranks have
    lost since the start counts above the shares in :data:`~.attribution.EVER_SINCE`. Time in collectives
    since the start does not count, since the necessary length of an exchange is unknown. If less than
    :data:`EXPLAINED` of a slowdown has a cause, a verdict ``UNKNOWN`` costs the rest. A wait of all ranks for
    data that was there before the slowdown, and lasts, is reported beside it, and so is the script's own
    code. If nothing is lost, the only verdict is ``NONE``, or ``UNKNOWN`` for ranks whose waits the host does
    not see. Whether a job without a cause is healthy is for :func:`~.claims.limit_claim` to decide.

    Args:
        cost: Returns the cost of a loader's worker on this machine.
    """
    seen = [rank for rank in ranks if rank.step_seconds > 0]
    if not seen:
        return [Verdict(Cause.UNKNOWN, run, "", None, "", "no training step was seen", 0.0, "torchperfd ps")]
    attribution = CauseAttribution(run, seen, cost)

    # A lack of processors on all ranks since the start makes all other times longer, too.
    is_shared, starved = False, [0.0] * len(seen)
    if attribution.since_start:
        is_shared, starved = _attribute_contention(attribution, seen, only_alike=True)
    for cause, phase, words, measure in _MEASURED:
        if cause is Cause.GARBAGE_COLLECTION and seen[0].collects_apart:
            words += _APART
        elif cause is Cause.CHECKPOINT and any(map(_mostly_in_background, seen)):
            phase, words = "", _BESIDE
        if cause is not Cause.CPU_CONTENTION:
            attribution.attribute(cause, phase, words, attribution.served(measure))
        elif not is_shared:
            _, starved = _attribute_contention(attribution, seen)
    _attribute_data(attribution, seen)
    _name_starved(attribution.verdicts, seen, starved)
    attribution.attribute_growth()
    attribution.attribute_synchronisation()
    attribution.attribute_lateness()
    attribution.attribute_imbalance()
    attribution.attribute_exchange()
    attribution.attribute(
        Cause.HOST_BOUND, "", "with the device idle while the host works", attribution.host_seconds
    )
    _attribute_script_code(attribution, seen)
    verdicts = sorted(attribution.verdicts, key=lambda verdict: -verdict.cost_seconds_per_step)
    unknown = _unknown(run, seen, attribution.step_seconds, verdicts)
    if unknown is not None:
        verdicts.insert(0, unknown)
    verdicts = _agreeing(_with_lasting(run, seen, verdicts, cost))
    if not verdicts and hide_waits(seen):
        verdicts = [_cannot_compare(run, seen, attribution.step_seconds)]
    if not verdicts:
        words = f"nothing takes {LEAST_SHARE:.0%} of a {duration(attribution.step_seconds)} step without need"
        if attribution.usual:
            usual = "; ".join(attribution.usual)
            words = f"nothing stands out of a {duration(attribution.step_seconds)} step: {usual}"
        verdicts = [Verdict(Cause.NONE, run, "", None, "", words, 0.0, next_command(Cause.NONE, run))]
    return verdicts


def _agreeing(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Return verdicts whose fixes agree: where a number of workers is advised, none says fewer."""
    has_number = any(each.cause is Cause.INPUT_BOUND and each.saves_seconds for each in verdicts)
    return [
        replace(each, fix=without_fewer_workers(each.fix))
        if has_number and each.cause is Cause.CPU_CONTENTION
        else each
        for each in verdicts
    ]


def _attribute_script_code(attribution: CauseAttribution, seen: Sequence[RankEvidence]) -> None:
    """Add a verdict on what the script does between the phases, or as its loss, on most ranks alike.

    What one rank does there more than the others makes it a slow rank. If a device works meanwhile, this code
    need not cost anything.
    """
    pasts = [rank.before for rank in seen if rank.before]
    if any(
        each.hides_script_code or each.on_device or each.device_busy is not None for each in (*seen, *pasts)
    ):
        return
    phase = script_code_phase([(rank.phase_seconds, rank.step_seconds) for rank in seen])
    shares = [rank.phase_seconds.get(phase, 0.0) / rank.step_seconds for rank in seen]
    is_large = statistics.median_low(shares) >= SCRIPT_CODE_SHARE
    if pasts and not is_large:
        return
    spent = statistics.median_low(attribution.left(rank, phase) for rank in seen)
    before = statistics.median_low(past.phase_seconds.get(phase, 0.0) for past in pasts) if pasts else 0.0
    current = {id(rank) for rank in seen}
    attribution.attribute(
        Cause.SCRIPT_CODE,
        phase,
        f"in {WORDS[phase]}",
        lambda each: spent if id(each) in current else before,
        # Earlier causes, such as a lack of processors, may have taken most of it.
        LEAST_SHARE if is_large else 0.0,
    )


def _attribute_contention(
    attribution: CauseAttribution, seen: Sequence[RankEvidence], *, only_alike: bool = False
) -> tuple[bool, list[float]]:
    """Attribute the wait for processors, and add to its verdict what to do about the ranks' threads.

    Returns:
        Whether it was judged, and by rank the part of the wait for data that it has claimed, in seconds.
    """
    waits = [attribution.left(rank, "data") for rank in seen]
    is_judged = attribution.attribute(*_CONTENTION, only_alike=only_alike)
    verdicts = attribution.verdicts
    if verdicts and verdicts[-1].cause is Cause.CPU_CONTENTION:
        rank = next(each for each in seen if verdicts[-1].rank in (None, each.rank))
        remedy = contention_remedy(
            rank.loader,
            rank.threads,
            cpus=rank.cpus,
            binding=rank.binding,
            on_device=rank.on_device,
            ranks=max(len(seen), rank.world_size),
        )
        verdicts[-1] = replace(verdicts[-1], fix=remedy.fix)
    return is_judged, [wait - attribution.left(rank, "data") for rank, wait in zip(seen, waits, strict=True)]


def _attribute_data(attribution: CauseAttribution, seen: Sequence[RankEvidence]) -> None:
    """Add a verdict on the wait for data, as far as no earlier cause has claimed it."""
    shares = [rank.phase_seconds.get("data", 0.0) / rank.step_seconds for rank in seen]
    is_large = attribution.lacks_processors and statistics.median_low(shares) >= INPUT_BOUND_SHARE
    attribution.attribute(
        Cause.INPUT_BOUND,
        "data",
        "waiting for data",
        lambda each: attribution.left(each, "data"),
        # Earlier causes, such as a garbage collection, may have taken most of it.
        LEAST_SHARE if is_large else 0.0,
    )


def _name_starved(verdicts: list[Verdict], seen: Sequence[RankEvidence], starved: Sequence[float]) -> None:
    """Add to the evidence of a wait for data which part of the same wait counts as CPU contention.

    Args:
        verdicts: The last one may be on a wait for data.
        starved: That part, by rank, in seconds per step.
    """
    if not verdicts or verdicts[-1].cause is not Cause.INPUT_BOUND:
        return
    named = [each for each in zip(seen, starved, strict=True) if verdicts[-1].rank in (None, each[0].rank)]
    rank, seconds = max(named, key=lambda each: each[1])
    if seconds >= LEAST_SHARE * rank.step_seconds:
        waited = duration(rank.phase_seconds["data"])
        words = (
            f"{verdicts[-1].evidence}; of {waited} waiting for data, {duration(seconds)} without a processor"
        )
        verdicts[-1] = replace(verdicts[-1], evidence=words)


def _with_lasting(
    run: str, seen: Sequence[RankEvidence], verdicts: list[Verdict], cost: LoaderCounsel
) -> list[Verdict]:
    """Return the verdicts on a slowdown with those on losses that all ranks had before it, too.

    A slowdown of a few percent must not hide that most of the step waits for data. The loss costs at most
    what the slowdown leaves of the step.
    """
    pasts = [rank.before for rank in seen if rank.before and rank.before.step_seconds]
    if len(pasts) < len(seen):
        return verdicts
    were_there = [
        causes
        for phase, share, causes in _LASTING
        if any(past.phase_seconds.get(phase, 0.0) >= share * past.step_seconds for past in pasts)
        and not any(each.cause in causes and each.rank is not None for each in verdicts)
    ]
    if not were_there:
        return verdicts
    then = {each.cause for each in rank_causes(run, pasts, cost) if each.rank is None}
    # Of the wait for processors only the part that is reported takes time from the other losses.
    starved = sum(each.cost_seconds_per_step for each in verdicts if each.cause is Cause.CPU_CONTENTION)
    lasting_only = [
        replace(rank, before=None, queued_seconds=min(rank.queued_seconds, starved)) for rank in seen
    ]
    now = rank_causes(run, lasting_only, cost)
    step = statistics.median(rank.step_seconds for rank in seen)
    for causes in were_there:
        lasting = next(
            (each for each in now if each.rank is None and each.cause in causes and each.cause in then), None
        )
        if lasting is not None:
            verdicts = _with_one_lasting(lasting, verdicts, step)
    return verdicts


def _with_one_lasting(lasting: Verdict, verdicts: Sequence[Verdict], step_seconds: float) -> list[Verdict]:
    grown = next((each for each in verdicts if each.cause is lasting.cause), None)
    others = [each for each in verdicts if each.cause not in {Cause.NONE, lasting.cause}]
    most = step_seconds - sum(each.cost_seconds_per_step for each in others)
    lasting = replace(lasting, cost_seconds_per_step=min(lasting.cost_seconds_per_step, max(0.0, most)))
    if grown is not None:
        words = f"{lasting.evidence}, {duration(grown.cost_seconds_per_step)} of it more than before"
        lasting = replace(lasting, evidence=words, has_grown=True)
    return sorted([*others, lasting], key=lambda each: -each.cost_seconds_per_step)


def _cannot_compare(run: str, ranks: Sequence[RankEvidence], step_seconds: float) -> Verdict:
    longest = max(rank.wait_seconds for rank in ranks)
    waits = f"ranks wait for {duration(longest)} of" if longest else "no wait for another rank is seen in"
    words = (
        f"cannot determine which rank is slow: {waits} each {duration(step_seconds)} step, as far as"
        f" devices show it; no other cause takes {LEAST_SHARE:.0%} of it"
    )
    return Verdict(
        Cause.UNKNOWN, run, "", None, "collective_wait", words, 0.0, next_command(Cause.UNKNOWN, run)
    )


def _unserved(rank: RankEvidence) -> float:
    """Return the wait for a processor, which for the threads of collectives counts beyond the past's only.

    Several of these wait one after the other and beside the step's own work, in every run to some degree. A
    rank with more work than in the past waits more often. That part of the growth is not a lack of
    processors.
    """
    queued, past = rank.queued_seconds - rank.throttled_seconds, rank.before
    if past is None:
        return queued
    does, did = rank.own_seconds - rank.queued_seconds, past.own_seconds - past.queued_seconds
    more = max(1.0, does / did) if did > 0 else 1.0
    grown = rank.exchange_queued_seconds - more * past.exchange_queued_seconds
    return queued - (more - 1) * past.queued_seconds + max(0.0, grown)


def _mostly_in_background(rank: RankEvidence) -> bool:
    return rank.background_save_seconds > rank.checkpoint_seconds


def _stored(rank: RankEvidence) -> float:
    """Return the part of the wait for data that storage causes.

    If storage causes most of it, all of it counts: the loader's other work, such as copying, belongs to the
    same reads.
    """
    waited = rank.phase_seconds.get("data", 0.0)
    return waited if rank.disk_seconds > EXPLAINED * waited else rank.disk_seconds


def _unknown(
    run: str, seen: Sequence[RankEvidence], step: float, verdicts: Sequence[Verdict]
) -> Verdict | None:
    """Return a verdict on a slowdown that is mostly unexplained, with the phase that has grown most."""
    slowed = [
        (rank.step_seconds - rank.before.step_seconds, rank, rank.before) for rank in seen if rank.before
    ]
    if not slowed:
        return None
    slower, rank, before = max(slowed, key=lambda each: each[0])
    # A cause that existed before explains nothing of the slowdown.
    unexplained = slower - sum(each.cost_seconds_per_step for each in verdicts if each.has_grown)
    if slower < LEAST_SHARE * step or unexplained <= (1 - EXPLAINED) * slower:
        return None
    if any(each.cause is Cause.CPU_CONTENTION for each in verdicts):
        # The wait of the ranks' other threads for a processor is not measured and may be the rest.
        return None
    knock_on = _knock_on(slowed, slower, verdicts)
    found = sum(each.cost_seconds_per_step for each in verdicts)
    unexplained = min(unexplained - knock_on, max(0.0, step - found))
    own = {name: seconds for name, seconds in rank.phase_seconds.items() if name not in WAITING}
    phase = max(own, key=lambda name: own[name] - before.phase_seconds.get(name, 0.0), default="")
    words = (
        f"steps take {duration(slower)} more than before, {duration(unexplained)} of it without a known cause"
    )
    words += f", and {duration(knock_on)} in exchanges that have grown with it" if knock_on else ""
    words += f"; {phase} has grown most" if phase else ""
    command = next_command(Cause.UNKNOWN, run)
    return Verdict(Cause.UNKNOWN, run, "", None, phase, words, unexplained, command, has_grown=True)


def _knock_on(
    slowed: Sequence[tuple[float, RankEvidence, RankEvidence]], slower: float, verdicts: Sequence[Verdict]
) -> float:
    """Return the part of a slowdown that is in exchanges if most of it is in the ranks' own work; else 0.

    Ranks that all work longer also arrive less evenly by chance, which makes exchanges longer. Less than
    :data:`LEAST_SHARE` of the slowdown counts as 0.

    Args:
        slowed: For each rank the growth of its step, its evidence and its past.
        verdicts: The verdicts so far, including one on the exchange.
    """
    own = statistics.median(rank.own_seconds - past.own_seconds for _, rank, past in slowed)
    exchange = sum(each.cost_seconds_per_step for each in verdicts if each.cause is Cause.COLLECTIVE)
    beyond = slower - own - exchange
    return beyond if own >= MOST_OF * slower and beyond >= LEAST_SHARE * slower else 0.0
