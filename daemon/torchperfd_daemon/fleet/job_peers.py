"""The daemons that jobs' own ranks know of: each has told the others which daemon watches it."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from torchperfd_daemon.errors import UsageError
from torchperfd_daemon.fleet.address import Address, parse_address
from torchperfd_daemon.fleet.credentials import Credentials

_MOST_TOLD: Final = 10_000


@dataclass(frozen=True, slots=True)
class JobPeers:
    """What ranks on this node have heard of other nodes' daemons, for as long as they train.

    Attributes:
        address: Where other daemons reach this one; ranks pass it on.
    """

    address: Address
    _told: "weakref.WeakKeyDictionary[Any, tuple[Address, ...]]" = field(
        default_factory=weakref.WeakKeyDictionary, compare=False
    )

    def hear(self, rank: object, addresses: Sequence[str]) -> None:
        """Take what a rank has heard, in place of what it said before.

        Raises:
            UsageError: These are no addresses, or too many.
        """
        if len(addresses) > _MOST_TOLD:
            raise UsageError(f"a rank has told of more than {_MOST_TOLD:,} daemons")
        self._told[rank] = tuple(map(parse_address, addresses))

    def forget(self, rank: object) -> None:
        """Do without what a rank has told: it trains no more."""
        self._told.pop(rank, None)

    async def read(self) -> list[Address]:
        """Return the addresses that any rank has told, each once."""
        return list(dict.fromkeys(address for told in self._told.values() for address in told))


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
