"""The daemons that jobs' own ranks know of: each has told the others which daemon watches it."""

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
    """What ranks on this node have heard of other nodes' daemons, for as long as they train.

    Attributes:
        address: Where other daemons reach this one; ranks pass it on.
    """

    address: Address
    _by_rank: "weakref.WeakKeyDictionary[Any, tuple[Address, ...]]" = field(
        default_factory=weakref.WeakKeyDictionary, compare=False
    )

    def on_addresses(self, rank: object, addresses: Sequence[str]) -> None:
        """Take what a rank has heard, in place of what it said before.

        Raises:
            UsageError: These are no addresses, or too many.
        """
        if len(addresses) > _MOST_PER_RANK:
            raise UsageError(f"a rank has told of more than {_MOST_PER_RANK:,} daemons")
        self._by_rank[rank] = tuple(map(parse_address, addresses))

    def forget(self, rank: object) -> None:
        """Do without what a rank has told: it trains no more."""
        self._by_rank.pop(rank, None)

    async def read(self) -> list[Address]:
        """Return the addresses that any rank has told, each once."""
        return list(dict.fromkeys(address for addresses in self._by_rank.values() for address in addresses))


def check_trust(credentials: Credentials) -> None:
    """Refuse to show the fleet's secret to whoever a training process names.

    Raises:
        UsageError: There is a secret, and nothing that tells peers from others before they see it.
    """
    if credentials.token and credentials.tls is None:
        raise UsageError(
            "with --fleet-peers job the training processes say where peers are, and these would be shown the"
            " secret of --fleet-token-file",
            "give --fleet-tls-cert, --fleet-tls-key and --fleet-tls-ca as well or instead",
        )
