"""Nodes of a fleet in this process: real fleet services on loopback, above ranks that need no training."""

import asyncio
import contextlib
import subprocess
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import grpc

from torchperfd_daemon.captures.catalog import Catalog
from torchperfd_daemon.captures.coordinator import Coordinator
from torchperfd_daemon.captures.manifest import CaptureOptions, RankFacts
from torchperfd_daemon.captures.rank_attempts import Ack, Participant, Result, failure
from torchperfd_daemon.fleet.addresses import Address
from torchperfd_daemon.fleet.credentials import Credentials, read_credentials
from torchperfd_daemon.fleet.peers import Peers, Static
from torchperfd_daemon.fleet.service import FleetService
from torchperfd_daemon.fleet.transport import AuthInterceptor, FanOut, listen
from torchperfd_daemon.fleet.view import FleetView
from torchperfd_daemon.metrics.health import CallCounts
from torchperfd_daemon.service.session import SessionService
from torchperfd_daemon.stacks.model import Outcome, RankStacks
from torchperfd_daemon.store.model import RankIdentity, State
from torchperfd_daemon.store.store import Rank, Store

RUN = "job"
GIVE_UP_S = 60
"""Longest that a scenario may take; reached by failing tests only."""


class PlayedRank:
    """A rank that executes each command at once, and records it."""

    def __init__(self, rank: int, world_size: int, coordinator: Coordinator) -> None:
        self.rank = rank
        self.steps_seen = 10
        self.facts = RankFacts(node=f"node{rank}", pid=rank + 1, world_size=world_size)
        self.reported: list[str] = []
        self.directory = Path()
        self.finishes = True
        self.committed = asyncio.Event()
        self._coordinator = coordinator

    def prepare(self, capture_id: str, options: CaptureOptions, directory: Path, max_bytes: int) -> None:
        """Be ready."""
        self.reported.append("prepare")
        self.directory = directory
        ack = Ack(True, "", 10 + self.rank, 0.01)
        asyncio.get_running_loop().call_soon(self._coordinator.on_ack, capture_id, self.rank, ack)

    def commit(self, capture_id: str, start_step: int, steps: int) -> None:
        """Have captured the steps."""
        self.reported.append(f"commit {start_step}+{steps}")
        self.committed.set()
        if self.finishes:
            name = f"rank{self.rank}.json"
            result = Result(True, "", False, start_step, name, 7, "ab", steps, steps)
            asyncio.get_running_loop().call_soon(self._coordinator.on_result, capture_id, self.rank, result)

    def cancel(self, capture_id: str, reason: str) -> None:
        """Take note."""
        self.reported.append(f"cancel: {reason}")
        result = failure(reason)
        asyncio.get_running_loop().call_soon(self._coordinator.on_result, capture_id, self.rank, result)


class PlayedSessions:
    """Stands for the session service."""

    def __init__(self, ranks: Sequence[PlayedRank]) -> None:
        self.ranks = list(ranks)

    def of_run(self, run: str) -> list[PlayedRank]:
        """Return the ranks, if it is their run."""
        return self.ranks if run == RUN else []

    async def stacks_of(
        self, ranks: Sequence[Rank], _seconds: float, *, allow_signal: bool = False
    ) -> AsyncIterator[RankStacks]:
        """Report that no peer answers."""
        for rank in ranks:
            own = rank.identity
            yield RankStacks(own.rank, own.world_size, own.node, own.pid, Outcome.NO_ANSWER, "played")


@dataclass
class PlayedNode:
    """One node."""

    address: Address
    catalog: Catalog
    coordinator: Coordinator
    ranks: list[PlayedRank]
    server: grpc.aio.Server
    interceptor: AuthInterceptor
    calls: CallCounts


Given = Credentials | Callable[[], Credentials] | None
"""Credentials that stay, or what returns those in force."""


def _current(given: Given) -> Callable[[], Credentials]:
    return given if callable(given) else lambda: given or Credentials()


async def start_node(
    directory: Path,
    ranks: Sequence[int],
    world_size: int,
    credentials: Given = None,
    address: Address | None = None,
) -> PlayedNode:
    """Start a node that has some ranks of the run."""
    name = f"node{ranks[0]}" if ranks else "bare"
    store = Store()
    catalog = Catalog(directory / name)
    coordinator = Coordinator(catalog)
    played = [PlayedRank(rank, world_size, coordinator) for rank in ranks]
    for rank in ranks:
        identity = RankIdentity(RUN, rank, world_size, node=name, pid=rank + 1)
        store.join(identity).state = State.TRAINING
    service = FleetService(
        store, cast("SessionService", PlayedSessions(played)), coordinator, catalog, f"i-{name}", name
    )
    interceptor = AuthInterceptor(_current(credentials))
    calls = CallCounts()
    server, where = await listen(address or Address("127.0.0.1", 0), interceptor, service, calls)
    return PlayedNode(where, catalog, coordinator, played, server, interceptor, calls)


@contextlib.asynccontextmanager
async def asking(
    directory: Path, peers: Sequence[Address], credentials: Given = None
) -> AsyncIterator[tuple[FleetView, Coordinator]]:
    """A daemon without ranks of its own that knows the peers."""
    coordinator = Coordinator(Catalog(directory / "asking"))
    fan_out = FanOut(_current(credentials))
    try:
        yield (
            FleetView(Peers(Static(tuple(peers))), fan_out, coordinator, "i-asking", "asking"),
            coordinator,
        )
    finally:
        await fan_out.close()


def may_all(uid: int | None) -> bool:
    """Let the caller command everybody's ranks."""
    return True


def none_here() -> dict[str, list[Participant]]:
    """Return the ranks of the asking daemon's own node."""
    return {}


def certificates(directory: Path, name: str, certified: str = "IP:127.0.0.1") -> Credentials:
    """Make an authority, and a certificate of it for this node, or for another name."""
    own = directory / name
    own.mkdir()
    extension = own / "ext"
    extension.write_text(f"subjectAltName={certified}\n")
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    for command in (
        ["req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=authority", "-days", "2"],
        ["req", *key, "-keyout", "node.key", "-out", "node.csr", "-subj", "/CN=node"],
        ["x509", "-req", "-in", "node.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
         "-out", "node.pem", "-days", "2", "-extfile", "ext"],
    ):  # fmt: skip
        subprocess.run(["openssl", *command], cwd=own, check=True, capture_output=True)
    return read_credentials(None, own / "node.pem", own / "node.key", own / "ca.pem")
