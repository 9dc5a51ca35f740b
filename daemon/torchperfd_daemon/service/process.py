"""Ranks as the kernel knows them."""

from torchperfd_daemon.collectors.ranks import RankProcess
from torchperfd_daemon.store import Rank


def process_of(rank: Rank) -> RankProcess:
    """Return the process that a rank is."""
    identity = rank.identity
    return RankProcess(
        identity.run, identity.rank, identity.pid, identity.pid_namespace, identity.process_start_ticks
    )
