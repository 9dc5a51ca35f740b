"""Finds the causes that show by comparing ranks, or in what the measured causes leave of a step. Pure."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from torchperfd.model.formatting import duration
from torchperfd_daemon.diagnosis.cause_table import (
    COLLECTIVES_SHARE,
    EXPLAINED,
    HOST_BOUND,
    MIN_COLLECTIVES,
    SMALL_BATCH,
    SMALL_BATCH_SHARE,
    SYNCHRONISATION,
    UNEVEN_SHARE,
    script_code,
    script_code_phase,
)
from torchperfd_daemon.diagnosis.cause_walk import Finding, Walk, idled_words
from torchperfd_daemon.diagnosis.edits import DATA, Edit, both, equal_work, less_exchange, less_host
from torchperfd_daemon.diagnosis.evidence import FULL_SOON_S
from torchperfd_daemon.diagnosis.step_model import StepModel
from torchperfd_daemon.diagnosis.verdict import Cause, of_step

FORESIGHT: Final = 150.0
"""Growth is extrapolated to at most this multiple of the time over which it was observed."""
_AS_LATE: Final = 0.9
"""Ranks whose lateness reaches this share of the longest one differ only by chance."""
_HALF: Final = 0.5
_MAX_NAMED: Final = 8
# The cause of a rank's lateness, by the phase that contains most of it; SLOW_RANK for other phases.
_OF_PHASE: Final[Mapping[str, Cause]] = {DATA: Cause.INPUT_BOUND, "checkpoint": Cause.CHECKPOINT}


def find_script_collectives(walk: Walk) -> None:
    """Find collectives that the script starts itself, several in each step.

    Their time on the rank that waits least is the exchange; the rest is the wait for the last rank, which
    they do not cause.
    """
    if min(rank.script_collectives for rank in walk.ranks) < MIN_COLLECTIVES or not walk.job.together:
        return
    seconds = min(rank.script_collective_seconds for rank in walk.ranks)
    seconds = min(seconds, float(walk.rest.model.exchange.mean()))
    edit = less_exchange(seconds)
    cost = min(seconds, walk.job.gain(edit))
    if cost < COLLECTIVES_SHARE * walk.step:
        return
    where = max(walk.ranks, key=lambda rank: rank.script_collective_seconds)
    line = where.script_collective_line
    words = f"{of_step(cost, walk.step)} in {where.script_collectives:.0f} collectives that the script starts"
    words += f" itself, most of them in {line}" if line else " itself"
    found = Finding(Cause.SCRIPT_COLLECTIVES, where, None, cost, words, edit, "collective_wait", lasts=True)
    walk.add(found, ever_since=True)


def find_memory_growth(walk: Walk) -> None:
    """Find memory that will soon be full.

    Its cost is the unclaimed lateness of the one rank that grows: the kernel has to clear new pages.
    """
    times = [(rank.full_in_seconds, rank) for rank in walk.ranks if rank.full_in_seconds is not None]
    if not times or any(each.cause is Cause.MEMORY_PRESSURE for each in walk.found):
        return
    full_in, rank = min(times, key=lambda each: each[0])
    if full_in > min(FULL_SOON_S, FORESIGHT * rank.grows_for_seconds):
        return
    words = f"memory grows by {rank.grows_by / 2**20:.3g} MiB/s and is full in {full_in / 60:.0f} min"
    alike = 2 * len(times) > len(walk.ranks) > 1
    place, cost = walk.ranks.index(rank), 0.0
    edit: Edit = less_host({})
    if not alike and rank.late_phase not in _OF_PHASE and walk.late[place] >= walk.least:
        edit = less_host({place: walk.late[place]})
        cost, walk.late[place] = walk.job.gain(edit), 0.0
        words += f"; {of_step(cost, rank.step_seconds)} more than its peers need"
    found = Finding(Cause.MEMORY_PRESSURE, rank, None if alike else rank.rank, cost, words, edit)
    walk.add(found, ever_since=True)


def find_synchronisation(walk: Walk) -> None:
    """Find devices that idle after the host has waited for them.

    Without that wait the host would have launched the next work meanwhile. A device that idles anyway,
    for the causes so far or because it waits for other ranks, as in the bubble of a pipeline, does not
    idle longer for this one.
    """
    claimed = walk.job.replayed.mean - walk.rest.replayed.mean
    idle = {
        id(rank): max(0.0, min(rank.sync_seconds, rank.idle_seconds - claimed))
        for rank in walk.ranks
        if rank.device_busy is not None
    }
    if not any(idle.values()):
        return
    longest = max(walk.ranks, key=lambda rank: idle.get(id(rank), 0.0))
    where = f", most of it in {longest.sync_line}" if longest.sync_line else ""
    row = replace(
        SYNCHRONISATION,
        words=f"{SYNCHRONISATION.words}{where}",
        measure=lambda rank, _: idle.get(id(rank), max(0.0, min(rank.sync_seconds, rank.idle_seconds))),
    )
    walk.measure(row)


def find_lateness(walk: Walk) -> None:
    """Find the rank with the largest unclaimed lateness.

    If several ranks are about equally late, the one with the lowest number is named, at every sample.
    """
    ranks, late = walk.ranks, walk.late
    longest = max(late)
    alike = [place for place in range(len(ranks)) if late[place] >= _AS_LATE * longest]
    place = min(alike, key=lambda each: ranks[each].rank)
    rank, excess = ranks[place], late[place]
    if excess < walk.least:
        return
    edit = _without_lateness(walk, {place: excess})
    cost, idled = min(excess, walk.job.gain(edit)) if walk.job.together else excess, 0.0
    if not rank.late_ever_since:
        cost, idled = walk.less_absorbed(rank, cost)
    together = _as_late_as(walk, place)
    if len(together) > 1:
        # Each of several late ranks costs nothing alone, and all of them together what they are late by.
        edit = _without_lateness(walk, together)
        cost = max(cost, min(excess, walk.job.gain(edit)))
    if cost < walk.least:
        return
    words = f"{of_step(cost, rank.step_seconds)} more than its peers need"
    words += f", most of it in {rank.late_phase}" if rank.late_phase else ""
    words += idled_words(idled)
    others = [
        each.rank for each, more in zip(ranks, late, strict=True) if each is not rank and more >= walk.least
    ]
    if others:
        named = ", ".join(map(str, others[:_MAX_NAMED]))
        words += f"; so {'do' if len(others) > 1 else 'does'} rank {named}"
    cause = _OF_PHASE.get(rank.late_phase, Cause.SLOW_RANK)
    if all(each.cause is not cause for each in walk.found):
        found = Finding(cause, rank, rank.rank, cost, words, edit, rank.late_phase)
        walk.add(found, ever_since=rank.late_ever_since)


def _as_late_as(walk: Walk, place: int) -> dict[int, float]:
    """Return the ranks of a group that work about as long as a late one, with what they are late by.

    Lateness that may be chance counts here, too: without it the late rank would cost nothing.
    """
    (group,) = (each for each in walk.job.groups if place in each)
    own = {each: walk.ranks[each].own_seconds for each in group}
    usual = own[place] - walk.late[place]
    excess = {each: min(seconds - usual, walk.late[place]) for each, seconds in own.items()}
    return {each: seconds for each, seconds in excess.items() if seconds >= _HALF * walk.late[place]}


def _without_lateness(walk: Walk, late: Mapping[int, float]) -> Edit:
    """Return the edit that takes lateness from hosts, and lets their devices work as long as most peers'.

    Args:
        late: By a rank's place, in seconds per step.
    """

    def edit(model: StepModel) -> StepModel:
        device = model.device.copy()
        works = device.sum(axis=0).mean(axis=1)
        for group in walk.job.groups:
            usual = statistics.median_low(works[group].tolist())
            for place in group:
                if place in late and works[place] > usual:
                    device[:, place] *= usual / works[place]
        return model.with_device(device)

    return both(less_host(late, peaks=True), edit)


def find_imbalance_of_stages(walk: Walk) -> None:
    """Find a pipeline whose stages work for different times.

    The step takes as long as the longest stage needs. With equal stages it would take their mean. Ranks
    without a stage are left out, and so is what causes have claimed of a rank's lateness.
    """
    stages = {stage: places for stage, places in walk.job.stages.items() if stage is not None}
    if len(stages) < 2 or not walk.job.together:
        return
    unclaimed = [
        rank.own_seconds - (rank.late_seconds - late)
        for rank, late in zip(walk.ranks, walk.late, strict=True)
    ]
    # Of an even number the lower one: a slow rank makes its stage no longer, not even of two.
    own = {
        stage: statistics.median_low(unclaimed[each] for each in places) for stage, places in stages.items()
    }
    longest, mean = max(own, key=lambda stage: own[stage]), statistics.fmean(own.values())
    cost = own[longest] - mean
    if cost < walk.least:
        return
    where = walk.ranks[stages[longest][0]]
    waits = statistics.median(walk.ranks[each].wait_seconds for places in stages.values() for each in places)
    words = (
        f"stage {longest} works {of_step(own[longest], where.step_seconds)}, the {len(stages)} stages"
        f" {duration(mean)} on average; ranks wait for {duration(waits)} of it; move layers from stage"
        f" {longest} to others"
    )
    edit = equal_work([range(len(walk.ranks))], means=True)
    walk.add(Finding(Cause.PIPELINE_IMBALANCE, where, None, cost, words, edit), ever_since=True)


def find_uneven_work(walk: Walk) -> None:
    """Find work that differs from step to step, so that each step waits for another rank."""
    if not walk.rest.has_steps or not walk.job.together:
        return
    edit = equal_work(walk.job.groups)
    cost = min(walk.job.gain(edit), walk.rest.gain(edit))
    queued = statistics.median(rank.queued_seconds for rank in walk.ranks)
    if cost - queued < UNEVEN_SHARE * walk.step:
        return
    where = max(walk.ranks, key=lambda rank: rank.wait_seconds)
    words = (
        f"{of_step(cost, walk.step)} waiting for ranks whose work differs from step to step; no rank is slow"
        " by itself"
    )
    found = Finding(Cause.UNEVEN_WORK, where, None, cost, words, edit, lasts=True)
    walk.add(found, ever_since=walk.growth < EXPLAINED * cost)


def find_growing_steps(walk: Walk) -> None:
    """Find steps that become longer with each step; they cost what they have grown by since the start."""
    if 2 * sum(rank.step_grows_seconds > 0 for rank in walk.ranks) <= len(walk.ranks):
        return
    where = max(walk.ranks, key=lambda rank: rank.step_grown_seconds)
    cost, phase = (
        min(where.step_grown_seconds, statistics.median(walk.rest.own.tolist())),
        where.step_grows_phase,
    )
    if cost < walk.least:
        return
    words = (
        f"{of_step(cost, walk.step)} more than at the start: each step takes"
        f" {duration(where.step_grows_seconds)} more than the one before"
    )
    words += f", most of it in {phase}" if phase else ""
    edit = less_host(dict.fromkeys(range(len(walk.ranks)), cost), phase)
    walk.add(Finding(Cause.GROWING_STEPS, where, None, cost, words, edit, phase))


def find_exchange(walk: Walk) -> None:
    """Find a growth of the time that even the last rank to arrive spends in collectives.

    If main threads wait longer for processors than before, the threads that carry out collectives may as
    well. Twice the wait is subtracted, since they first collect and then distribute.
    """
    cost = walk.exchange_growth
    starved = [
        max(0.0, rank.queued_seconds - rank.before.queued_seconds) for rank in walk.ranks if rank.before
    ]
    if cost <= 0 or cost - 2 * statistics.median(starved) < walk.least:
        return
    if walk.ranks[0].on_device:
        # Waits on devices contain what the hosts' own delays add there, too.
        cost = min(cost, walk.growth)
    words = f"{of_step(cost, walk.step)} in collectives after the last rank has arrived, more than before"
    edit = less_exchange(cost)
    walk.add(Finding(Cause.COLLECTIVE, walk.ranks[0], None, cost, words, edit, "collective_wait"))


def find_host_bound(walk: Walk) -> None:
    """Find devices that idle while their hosts work, and always have."""
    if walk.since_start:
        walk.measure(HOST_BOUND)


def find_script_code(walk: Walk) -> None:
    """Find what the script does between the phases, or as its loss, on most ranks alike.

    What one rank does there more than the others makes it a slow rank. If a device works meanwhile, this
    code need not cost anything.
    """
    ranks, pasts = walk.ranks, walk.pasts
    if any(
        each.hides_script_code or each.on_device or each.device_busy is not None for each in (*ranks, *pasts)
    ):
        return
    phase = script_code_phase(ranks)
    row = script_code(phase)
    shares = [rank.phase_seconds.get(phase, 0.0) / rank.step_seconds for rank in ranks]
    if pasts and statistics.median_low(shares) < row.ever_since:
        return
    spent = statistics.median_low(walk.rest.left(place, phase) for place in range(len(ranks)))
    before = statistics.median_low(past.phase_seconds.get(phase, 0.0) for past in pasts) if pasts else 0.0
    beyond = max(0.0, spent - before)
    if beyond > 0:
        alike = [beyond] * len(ranks)
        least = row.ever_since if walk.is_state_hidden else 0.0
        # What differs between ranks and steps is uneven work.
        walk.add_alike(row, alike, alike, 0, least, most=beyond)


def find_small_batches(walk: Walk) -> None:
    """Find steps of a few samples that mostly do what every step does, whatever the size of its batch.

    The optimizer's work is of the parameters, not of the samples: a batch of twice the size would need
    half of it for a sample.
    """
    loader, rest = walk.ranks[0].loader, walk.rest
    size = loader.batch_size if loader is not None else 0
    if not 0 < size <= SMALL_BATCH or walk.job.model.has_device or not walk.since_start:
        return
    places = range(len(walk.ranks))
    saved = {place: (rest.left(place, "optimizer") + rest.left(place, "zero_grad")) / 2 for place in places}
    edit = less_host(saved, "optimizer")
    cost = walk.job.gain(edit)
    if cost < SMALL_BATCH_SHARE * walk.step:
        return
    words = (
        f"{of_step(cost, walk.step)} for a batch of {size}, which one of twice the size would save: the"
        " optimizer takes as long whatever the size of the batch"
    )
    found = Finding(Cause.SMALL_BATCHES, walk.ranks[0], None, cost, words, edit, "optimizer")
    walk.add(found, ever_since=True)


def find_all(walk: Walk) -> list[Finding]:
    """Return all causes of a job's lost time, in the order of the table."""
    walk.measure_all()
    for find in _FINDERS:
        find(walk)
    return walk.found


_FINDERS: Final[Sequence[Callable[[Walk], None]]] = (
    find_script_collectives,
    find_memory_growth,
    find_synchronisation,
    find_lateness,
    find_imbalance_of_stages,
    find_uneven_work,
    find_growing_steps,
    find_exchange,
    find_host_bound,
    find_script_code,
    find_small_batches,
)
