"""Ranks as the kernel knows them."""

from torchperfd_daemon.collectors.ranks import RankProcess
from torchperfd_daemon.store import Rank


def process_of(rank: Rank) -> RankProcess:
    """Return the process that a rank is; of one whose process is not known, none that there is."""
    identity = rank.identity
    return RankProcess(
        identity.run,
        identity.rank,
        identity.pid if rank.is_process_known else 0,
        identity.pid_namespace,
        identity.process_start_ticks,
    )
