"""Peer addresses from the ranks of a job, which exchange the addresses of their daemons.

A rank may name any address, and the daemon has rights and ways through a firewall that its user lacks. So it
connects only to the port of the fleet, only for the users whose ranks name an address, and to few for each.
"""

import logging
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from torchperfd_daemon.collectors.procfs import read
from torchperfd_daemon.errors import UsageError
from torchperfd_daemon.fleet.address import Address, parse_address
from torchperfd_daemon.fleet.credentials import Credentials
from torchperfd_daemon.logs import LogLimiter
from torchperfd_daemon.rpc.callers import Rate, UserRate
from torchperfd_daemon.service.targets import MayCommand
from torchperfd_daemon.store import Rank

log = logging.getLogger("torchperfd.fleet")

MAX_PER_USER: Final = 2_048
"""Enough for a job of 16,000 GPUs."""
LISTS: Final = Rate(1, 1_024)
"""Reports of one user; a rank sends one whenever its job has more nodes."""
_LISTENS: Final = "0A"
_TABLES: Final = ("net/tcp", "net/tcp6")


class JobPeers:
    """The daemons' addresses that ranks on this node report, as long as they train.

    Args:
        address: The address of this daemon for other daemons; ranks pass it on.
    """

    def __init__(self, address: Address, proc: Path = Path("/proc/self")) -> None:
        self.address = address
        self.dropped = 0
        """Addresses that were not accepted since the daemon started."""
        self._proc = proc
        self._by_rank: weakref.WeakKeyDictionary[Rank, tuple[Address, ...]] = weakref.WeakKeyDictionary()
        self._limiter = LogLimiter(log)
        self._rate = UserRate("lists of daemons", LISTS)

    def on_addresses(self, rank: Rank, addresses: Sequence[str]) -> None:
        """Replace a rank's addresses; those that cannot be a daemon of its job are dropped and counted."""
        uid = rank.process.uid
        listed = dict.fromkeys(addresses)
        accepted: list[Address] = []
        if self._rate.take(uid, 1) == 0:
            self._by_rank.pop(rank, None)
            known = self._of_user(uid)
            for text in [*listed][:MAX_PER_USER]:
                address = self._accepted(text, uid)
                if address is not None and (address in known or len(known) < MAX_PER_USER):
                    known.add(address)
                    accepted.append(address)
            self._by_rank[rank] = tuple(accepted)
        if dropped := len(listed) - len(accepted):
            self.dropped += dropped
            self._limiter.warning(
                "%d of %d addresses that rank %d of run %s reports are dropped: each must have port %d, and a"
                " user may report %d of them",
                dropped,
                len(listed),
                rank.identity.rank,
                rank.identity.run,
                self.address.port,
                MAX_PER_USER,
            )

    def forget(self, rank: Rank) -> None:
        """Drop the addresses of a rank that has left."""
        self._by_rank.pop(rank, None)

    async def addresses(self, may: MayCommand) -> tuple[Address, ...]:
        """Return the addresses that ranks of a caller report, each once.

        Args:
            may: Returns whether the caller may command the processes of a user.
        """
        return tuple(
            dict.fromkeys(
                address
                for rank, addresses in self._by_rank.items()
                if may(rank.process.uid)
                for address in addresses
            )
        )

    def _of_user(self, uid: int | None) -> set[Address]:
        return {
            address
            for rank, addresses in self._by_rank.items()
            if rank.process.uid == uid
            for address in addresses
        }

    def _accepted(self, text: str, uid: int | None) -> Address | None:
        """Return an address that may be that of a daemon of a user's job; None for any other."""
        try:
            address = parse_address(text)
        except UsageError:
            return None
        if address.port == self.address.port:
            return address
        # All daemons of a test on one node share loopback, so their ports differ.
        is_own = self.address.is_loopback and address.is_loopback and self._listener(address.port) == uid
        return address if is_own else None

    def _listener(self, port: int) -> int | None:
        """Return the user who listens on a TCP port of this node; None unless exactly one user does."""
        users = set()
        for table in _TABLES:
            try:
                lines = read(f"{self._proc}/{table}").splitlines()[1:]
            except OSError:
                continue
            for line in lines:
                _, local, _, state, *_, uid = line.split()[:8]
                if state == _LISTENS and int(local.rpartition(":")[2], 16) == port:
                    users.add(int(uid))
        return users.pop() if len(users) == 1 else None


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
