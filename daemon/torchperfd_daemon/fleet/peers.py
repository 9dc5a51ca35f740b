"""The other daemons' addresses from ``--fleet-peers``, read again when they are needed.

Each form is a source. Parsing is pure; only one small method of each source reads a file, a resolver or
the environment.
"""

import asyncio
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import msgspec

from torchperfd_daemon import documents
from torchperfd_daemon.errors import TorchperfdError, UsageError, explained
from torchperfd_daemon.fleet.address import DEFAULT_PORT, Address, expand_hostlist, parse_address, parse_port
from torchperfd_daemon.fleet.job_peers import JobPeers
from torchperfd_daemon.service.targets import MayCommand

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
        """Return it."""
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
        groups = documents.decode(document, list[_Group])
    except documents.DamagedError as error:
        raise UsageError(
            f"the fleet's peers are not in the format of file_sd ({error})",
            'write [{"targets": ["node1:9408"]}]',
        ) from error
    return [parse_address(target) for group in groups for target in group.targets]
