"""Peer addresses from the ranks of a job, which exchange the addresses of their daemons."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from torchperfd_daemon.errors import UsageError
from torchperfd_daemon.fleet.address import Address, parse_address
from torchperfd_daemon.fleet.credentials import Credentials

_MOST_PER_RANK: Final = 10_000


@dataclass(frozen=True, slots=True)
class JobPeers:
    """The daemons' addresses that ranks on this node report, as long as they train.

    Attributes:
        address: The address of this daemon for other daemons; ranks pass it on.
    """

    address: Address
    _by_rank: "weakref.WeakKeyDictionary[Any, tuple[Address, ...]]" = field(
        default_factory=weakref.WeakKeyDictionary, compare=False
    )

    def on_addresses(self, rank: object, addresses: Sequence[str]) -> None:
        """Replace a rank's addresses.

        Raises:
            UsageError: An address is malformed, or there are too many.
        """
        if len(addresses) > _MOST_PER_RANK:
            raise UsageError(f"a rank reports more than {_MOST_PER_RANK:,} daemons")
        self._by_rank[rank] = tuple(map(parse_address, addresses))

    def forget(self, rank: object) -> None:
        """Drop the addresses of a rank that has left."""
        self._by_rank.pop(rank, None)

    async def read(self) -> list[Address]:
        """Return the addresses that any rank reports, each once."""
        return list(dict.fromkeys(address for addresses in self._by_rank.values() for address in addresses))


def check_trust(credentials: Credentials) -> None:
    """Refuse to send the fleet's secret to addresses that a training process names.

    Raises:
        UsageError: There is a secret, and no TLS to authenticate peers before it is sent.
    """
    if credentials.token and credentials.tls is None:
        raise UsageError(
            "with --fleet-peers job the training processes name the peers, and the daemon would send them the"
            " secret of --fleet-token-file",
            "give --fleet-tls-cert, --fleet-tls-key and --fleet-tls-ca as well or instead",
        )
