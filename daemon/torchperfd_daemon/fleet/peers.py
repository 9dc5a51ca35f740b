"""The other daemons' addresses: from ``--fleet-peers``, or from the ranks of a job.

``--fleet-peers`` is read again when the addresses are needed. Ranks exchange the addresses of their daemons.
"""

import asyncio
import logging
import os
import socket
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import msgspec

from torchperfd_daemon import untrusted_files
from torchperfd_daemon.collectors.procfs import read
from torchperfd_daemon.errors import TorchperfdError, UsageError, explained
from torchperfd_daemon.fleet.addresses import (
    DEFAULT_PORT,
    Address,
    expand_hostlist,
    parse_address,
    parse_port,
)
from torchperfd_daemon.fleet.credentials import Credentials
from torchperfd_daemon.rpc.callers import Rate, UserRate
from torchperfd_daemon.service.targets import MayCommand
from torchperfd_daemon.store.store import Rank
from torchperfd_daemon.text import LogLimiter

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


MAX_PEERS: Final = 10_000
_MAX_FILE_BYTES: Final = 4 * 2**20
_FRESH_S: Final = 5.0
_ANY: Final = ("0.0.0.0", "::")
_FORMS: Final = (
    "write host:port,..., file:PATH, dns:NAME:PORT, slurm:HOSTLIST:PORT, slurm:env, job or job:HOST:PORT"
)


class Source(Protocol):
    """A source of daemons' addresses."""

    async def read(self) -> list[Address]:
        """Return the current addresses.

        Raises:
            TorchperfdError: They cannot be read.
        """


@dataclass(frozen=True, slots=True)
class Static:
    """A list that never changes."""

    addresses: tuple[Address, ...]

    async def read(self) -> list[Address]:
        return list(self.addresses)


@dataclass(frozen=True, slots=True)
class TargetsFile:
    """A file as Prometheus' ``file_sd_configs`` read it, in JSON."""

    path: Path

    async def read(self) -> list[Address]:
        """Return the targets of all its groups.

        Raises:
            TorchperfdError: It cannot be read.
            UsageError: It holds something else.
        """
        return parse_targets(await asyncio.to_thread(self._content))

    def _content(self) -> bytes:
        problem = f"cannot read the fleet's peers from {self.path}"
        with explained(problem, "check --fleet-peers of `torchperfd serve`"), self.path.open("rb") as file:
            return file.read(_MAX_FILE_BYTES + 1)


@dataclass(frozen=True, slots=True)
class Dns:
    """All addresses of a name, such as that of a headless Service."""

    name: str
    port: int

    async def read(self) -> list[Address]:
        """Return the resolver's answer.

        Raises:
            TorchperfdError: It knows no such name.
        """
        try:
            found = await asyncio.get_running_loop().getaddrinfo(
                self.name, self.port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP
            )
        except OSError as error:
            raise TorchperfdError(
                f"the fleet's peers cannot be found: {self.name} does not resolve ({error.strerror})",
                "check --fleet-peers of `torchperfd serve`",
            ) from error
        # Addresses of pods are not known when certificates are made: the name is what a certificate has.
        return sorted({Address(str(where[0]), self.port, self.name) for *_, where in found})


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """The nodes of the Slurm job that the daemon runs in."""

    port: int
    environ: Mapping[str, str]

    async def read(self) -> list[Address]:
        """Return its nodes.

        Raises:
            TorchperfdError: There is no job.
            UsageError: Its list of nodes cannot be read.
        """
        nodes = self.environ.get("SLURM_JOB_NODELIST", "")
        if not nodes:
            raise TorchperfdError(
                "the fleet's peers cannot be found: SLURM_JOB_NODELIST is not set",
                "start the daemon within the job, or name its nodes with slurm:HOSTLIST:PORT",
            )
        return [Address(host, self.port) for host in expand_hostlist(nodes, MAX_PEERS)]


class Peers:
    """The fleet's addresses, read again when they are some seconds old.

    Args:
        source: Where they come from.
    """

    def __init__(self, source: Source, clock: Callable[[], float] = time.monotonic) -> None:
        self._source = source
        self._clock = clock
        self._known: tuple[Address, ...] = ()
        self._read_at: float | None = None

    async def addresses(self, may: MayCommand) -> tuple[Address, ...]:
        """Return each address once, in the source's order; the same for all callers.

        Raises:
            TorchperfdError: The source cannot be read.
        """
        now = self._clock()
        if self._read_at is None or now - self._read_at >= _FRESH_S:
            found = dict.fromkeys(await self._source.read())
            if len(found) > MAX_PEERS:
                raise UsageError(f"the fleet has {len(found):,} peers; the maximum is {MAX_PEERS:,}")
            self._known, self._read_at = tuple(found), now
        return self._known


class PeerAddresses(Protocol):
    """The addresses of the fleet's daemons."""

    async def addresses(self, may: MayCommand) -> tuple[Address, ...]:
        """Return those that are asked for a caller, each once.

        Args:
            may: Returns whether the caller may command the processes of a user.

        Raises:
            TorchperfdError: They cannot be read.
        """


def parse_peers(
    text: str, environ: Mapping[str, str] | None = None, own: Address | None = None
) -> Source | JobPeers:
    """Read the value of ``--fleet-peers``.

    Args:
        text: ``host:port,...``, ``file:PATH``, ``dns:NAME:PORT``, ``slurm:HOSTLIST:PORT`` or ``slurm:env``,
            the last with or without a port; ``job``, or ``job:HOST:PORT`` where others reach this daemon.
        environ: Of the process; ours by default.
        own: Where this daemon listens for others; None for nowhere.

    Raises:
        UsageError: It is none of these.
    """
    kind, _, rest = text.partition(":")
    if kind == "file":
        if not rest or "\0" in rest:
            raise UsageError(f"{text[:60]!r} does not name a file", _FORMS)
        return TargetsFile(Path(rest))
    if kind == "job":
        return JobPeers(parse_address(rest) if rest else _reachable(own))
    if kind == "dns":
        address = parse_address(rest)
        return Dns(address.host, address.port)
    if kind == "slurm":
        hosts, colon, port = rest.rpartition(":")
        if not colon:
            hosts, port = rest, str(DEFAULT_PORT)
        if hosts == "env":
            return SlurmJob(parse_port(port), os.environ if environ is None else environ)
        return Static(tuple(Address(host, parse_port(port)) for host in expand_hostlist(hosts, MAX_PEERS)))
    if text.count(",") >= MAX_PEERS:
        raise UsageError(f"there are more than {MAX_PEERS:,} peers")
    addresses = tuple(parse_address(part.strip()) for part in text.split(",") if part.strip())
    if not addresses:
        raise UsageError("no peer is named", _FORMS)
    return Static(addresses)


def _reachable(own: Address | None) -> Address:
    """Return where other nodes reach a daemon that listens there: by its name, if on all addresses.

    Raises:
        UsageError: It listens nowhere, or on a port that is yet to be chosen.
    """
    if own is None or not own.port:
        raise UsageError(
            "--fleet-peers job needs an address for other nodes to reach this daemon",
            "give --fleet-address HOST:PORT, too",
        )
    return Address(socket.gethostname(), own.port) if own.host in _ANY else own


class _Group(msgspec.Struct):
    targets: list[str] = []


def parse_targets(document: bytes) -> list[Address]:
    """Return the targets of all groups of a ``file_sd`` document; labels mean nothing here.

    Raises:
        UsageError: It is none, or too large.
    """
    if len(document) > _MAX_FILE_BYTES:
        raise UsageError(f"the file of the fleet's peers has more than {_MAX_FILE_BYTES:,} bytes")
    try:
        groups = untrusted_files.decode(document, list[_Group])
    except untrusted_files.DamagedError as error:
        raise UsageError(
            f"the fleet's peers are not in the format of file_sd ({error})",
            'write [{"targets": ["node1:9408"]}]',
        ) from error
    return [parse_address(target) for group in groups for target in group.targets]
