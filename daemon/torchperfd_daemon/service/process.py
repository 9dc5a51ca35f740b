"""Ranks as the kernel knows them."""

from collections.abc import Iterable

from torchperfd_daemon.collectors.ranks import RankProcess
from torchperfd_daemon.errors import NoSuchTargetError
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


def check_real(ranks: Iterable[Rank]) -> None:
    """Refuse to ask ranks that are simulated, if all are; there may be none at all.

    Raises:
        NoSuchTargetError: There is no process behind any of them.
    """
    asked = list(ranks)
    if asked and all(rank.identity.is_simulated for rank in asked):
        raise NoSuchTargetError(
            f"run {asked[0].identity.run} is simulated (`torchperfd serve --demo`): it has no processes",
            "start a real one with `torchperfd run train.py`",
        )
