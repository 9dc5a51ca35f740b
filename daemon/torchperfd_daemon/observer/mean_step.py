"""The verdict on a run's mean step: the one of a run that ends before another is published."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from torchperfd_daemon.diagnosis import RankEvidence, Verdict, diagnose
from torchperfd_daemon.diagnosis.detect import find_stragglers
from torchperfd_daemon.loader_workers import SettledAdvice
from torchperfd_daemon.observer.loader_adviser import LoaderAdviser, LoaderSample
from torchperfd_daemon.observer.rank_watch import host_work, is_on_device, stage_of
from torchperfd_daemon.observer.window_facts import WindowEdge, with_window_facts
from torchperfd_daemon.store import Rank, Totals
from torchperfd_daemon.worker_cost import THIS_MACHINE


def verdict_on_mean_step(run: str, ranks: Sequence[Rank]) -> Verdict:
    """Return the verdict on the mean of all steps of a run so far.

    Args:
        ranks: All of the run's ranks on this node.
    """
    adviser = LoaderAdviser(THIS_MACHINE.get)
    adviser.published = loader_advice_of(ranks)
    has_ended = all(rank.has_ended for rank in ranks)
    # While a run goes on, windows of its steps will decide on what single steps show.
    works = {rank.identity.rank: host_work(rank, rank.steady_steps) for rank in ranks} if has_ended else {}
    late = {each.rank: each for each in find_stragglers([*works.values()])}
    means = []
    for rank in ranks:
        mean = _mean_step(rank)
        if straggler := late.get(mean.rank):
            mean = replace(mean, late_seconds=straggler.excess_seconds, late_phase=straggler.phase)
        means.append(mean)
    slowest = max(ranks, key=lambda rank: rank.totals.steady_means()[1], default=None)
    newest = slowest.newest_step_seconds() if slowest else np.zeros(0)
    return diagnose(run, means, adviser, works, has_ended=has_ended, newest=newest)


def loader_advice_of(ranks: Sequence[Rank]) -> SettledAdvice | None:
    """Return what the run of these ranks is advised on its loaders.

    It is what was settled while the run was observed. Of a run that ended before, its mean step decides; of
    one that goes on it is None until it is settled.
    """
    settled = next((rank.loader_advice for rank in ranks if rank.loader_advice is not None), None)
    if settled is not None or not all(rank.has_ended for rank in ranks):
        return settled
    return advice_on_mean_step(ranks)


def advice_on_mean_step(ranks: Iterable[Rank]) -> SettledAdvice | None:
    """Return what the mean step of all steps so far advises on loaders; None without a loader."""
    adviser = LoaderAdviser(THIS_MACHINE.get, fewest=1)
    adviser.observe([*mean_step_samples(ranks)])
    return adviser.settle()


def mean_step_samples(ranks: Iterable[Rank]) -> Iterator[LoaderSample]:
    """Yield how ranks have waited for their loaders in their mean steps, of those that have any."""
    for rank in ranks:
        steps, step_seconds, phase_seconds = rank.totals.steady_means()
        if steps and rank.totals.loader is not None:
            data, on_device = phase_seconds.get("data", 0.0), bool(rank.totals.device_means(step_seconds))
            yield LoaderSample(rank.identity.rank, rank.totals.loader, step_seconds, data, on_device)


def _mean_step(rank: Rank) -> RankEvidence:
    """Return the means of all steps of a rank without its first one."""
    totals, identity = rank.totals, rank.identity
    steps, step_seconds, phase_seconds = totals.steady_means()
    evidence = RankEvidence(
        identity.rank,
        identity.node,
        step_seconds,
        phase_seconds,
        totals.device_means(step_seconds),
        steps=steps,
        collected_seconds=sum(each.ns for each in totals.gc) / 1e9 / max(1, totals.train.steps),
        blocked_seconds=rank.blocked_seconds,
        queued_seconds=rank.queued_seconds,
        on_device=is_on_device(totals),
        hides_script_code=totals.hides_script_code,
        forward_unseen=totals.forward_unseen,
        loader=totals.loader,
        threads=totals.threads,
        cpus=totals.cpus,
        binding=totals.binding,
        world_size=identity.world_size,
        stage=stage_of(totals),
    )
    return with_window_facts(evidence, WindowEdge.of(Totals()), totals)
