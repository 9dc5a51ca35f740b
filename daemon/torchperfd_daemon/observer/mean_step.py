"""The verdict on a run's mean step: the one of a run that ends before another is published."""

from collections.abc import Iterable, Iterator, Sequence

from torchperfd_daemon.diagnosis import RankProfile, Verdict, diagnose
from torchperfd_daemon.loader_workers import SettledAdvice
from torchperfd_daemon.observer.loader_adviser import LoaderAdviser, LoaderSample
from torchperfd_daemon.store import Rank
from torchperfd_daemon.worker_cost import THIS_MACHINE


def verdict_on_mean_step(run: str, ranks: Sequence[Rank]) -> Verdict:
    """Return the verdict on the mean of all steps of a run so far.

    Args:
        ranks: All of the run's ranks on this node.
    """
    numbered = {rank.identity.rank: rank for rank in ranks}

    def p95_of(rank: int) -> float:
        return numbered[rank].p95_step_seconds()

    adviser = LoaderAdviser(THIS_MACHINE.get)
    adviser.published = loader_advice_of(ranks)
    return diagnose(run, [_profile(rank) for rank in ranks], adviser, p95_of)


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


def _profile(rank: Rank) -> RankProfile:
    totals, identity = rank.totals, rank.identity
    steps, step_seconds, phase_seconds = totals.steady_means()
    return RankProfile(
        identity.rank,
        identity.node,
        steps,
        step_seconds,
        phase_seconds,
        totals.loader,
        hides_script_code=totals.hides_script_code,
        has_ended=rank.has_ended,
        world_size=identity.world_size,
        device_phase_seconds=totals.device_means(step_seconds),
        forward_unseen=totals.forward_unseen,
        blocked_seconds=rank.blocked_seconds,
        queued_seconds=rank.queued_seconds,
        binding=totals.binding,
    )
