"""What every document says about itself: scope, window, freshness, and the ranks that it covers."""

import time
from collections.abc import Iterable, Sequence
from typing import Any

from torchperfd.v1 import control_pb2
from torchperfd_daemon.store import Rank
from torchperfd_daemon.web.access import Access


def view_dict(
    node: str,
    access: Access,
    statuses: "Iterable[control_pb2.RankStatus | Rank]" = (),
    *,
    fleet: bool = False,
    unreachable: Sequence[control_pb2.UnreachablePeer] = (),
    window_seconds: float | None = None,
) -> dict[str, Any]:
    """Return the key ``view`` of a document.

    Args:
        node: This daemon's.
        statuses: The ranks that the document is about, as messages or as they are kept here.
        fleet: Whether it is about all nodes.
        unreachable: Daemons that did not answer.
        window_seconds: The span of time that it is about; None for none.
    """
    now = time.time()
    known: dict[str, int] = {}
    held: dict[str, int] = {}
    reporting, newest = 0, 0.0
    for status in statuses:
        run = status.identity.run
        known[run] = max(known.get(run, 0), status.identity.world_size)
        held[run] = held.get(run, 0) + 1
        reporting += status.connected
        newest = max(newest, status.last_step_unix_seconds)
    ranks = sum(max(size, held[run]) for run, size in known.items())
    return {
        "scope": "fleet" if fleet else "node",
        "node": node,
        "at_unix_seconds": now,
        "window_seconds": window_seconds,
        "newest_unix_seconds": newest or None,
        "age_seconds": max(0.0, now - newest) if newest else None,
        "ranks_known": ranks,
        "ranks_reporting": reporting,
        "ranks_elsewhere": ranks - reporting,
        "unreachable": [{"address": peer.address, "reason": peer.reason} for peer in unreachable],
        "access": access.value,
    }
