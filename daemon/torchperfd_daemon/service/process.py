"""Distinguishes real ranks from simulated ones."""

from collections.abc import Iterable

from torchperfd_daemon.errors import NoSuchTargetError
from torchperfd_daemon.store import Rank


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
