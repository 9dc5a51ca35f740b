"""The verdict on a run's mean step: the one of a run that ends before another is published."""

from collections.abc import Sequence

from torchperfd_daemon.diagnosis import RankProfile, Verdict, diagnose
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

    return diagnose(run, [_profile(rank) for rank in ranks], THIS_MACHINE.get, p95_of)


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
