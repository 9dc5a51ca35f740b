"""Access over HTTP: the page's token, links that work without it for one minute, and what may be read."""

import contextlib
import hmac
import os
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from starlette.datastructures import Headers

from torchperfd.v1 import access, control_pb2
from torchperfd_daemon.captures import folder
from torchperfd_daemon.captures.catalog import Catalog
from torchperfd_daemon.captures.coordinator import Coordinator
from torchperfd_daemon.collectors.base import Family, Sampler
from torchperfd_daemon.errors import TorchperfdError, explained
from torchperfd_daemon.goodput.totals import RunGoodput
from torchperfd_daemon.rpc.callers import UNKNOWN, Caller, own_uid
from torchperfd_daemon.service.control import ControlService
from torchperfd_daemon.service.permissions import LocalCall, Rights
from torchperfd_daemon.service.translate_diagnosis import run_goodput_from_message
from torchperfd_daemon.store.model import RankIdentity
from torchperfd_daemon.store.store import Rank, Store
from torchperfd_daemon.views.model import whole_name

TOKEN_FILE: Final = "page.token"
HEADER: Final = "x-torchperfd-token"


class Access(Enum):
    """What a request may do."""

    OWNER = "owner"
    """The token's holder: everything that the daemon's own user may."""
    STRANGER = "stranger"
    """No token: what any user of the node may see."""
    REFUSED = "refused"
    """A token, and the wrong one."""

    def call(self) -> Any:
        """Return a call of the control service with these rights, in place of gRPC's context."""
        if self is Access.OWNER:
            return LocalCall(Rights(Caller(uid=own_uid(), pid=os.getpid()), is_admin=True))
        return LocalCall(Rights(UNKNOWN, is_admin=False))


class PageToken:
    """A secret that the daemon makes at its start."""

    def __init__(self, secret: str = "") -> None:
        self._secret = secret or secrets.token_urlsafe(32)

    def access_of(self, headers: Headers) -> Access:
        """Return what the sender of a request may do."""
        given = headers.get(HEADER)
        if given is None:
            scheme, _, credentials = headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer":
                # None, or a name and a password, which the web configuration is about.
                return Access.STRANGER
            given = credentials
        right = hmac.compare_digest(given.strip().encode(), self._secret.encode())
        return Access.OWNER if right else Access.REFUSED

    def store(self, socket: str) -> Path:
        """Write the secret beside the daemon's socket, for the user of the daemon alone.

        Returns:
            The file.

        Raises:
            TorchperfdError: It cannot be written, or another user has put something in its place.
        """
        path = token_path(socket)
        with (
            explained(f"cannot write {path}", "choose another path with --socket"),
            access.opened_directory(str(path.parent)) as directory,
        ):
            # A file of an earlier daemon is replaced rather than written into: it may be open elsewhere.
            folder.write(directory, path.name, self._secret.encode() + b"\n")
        return path


def token_path(socket: str) -> Path:
    """Return where the daemon with a socket keeps its token: beside it, under its name if that is another."""
    path = Path(socket)
    return path.with_name(TOKEN_FILE if path.name == "daemon.sock" else f"{path.name}.{TOKEN_FILE}")


def remove_token(socket: str) -> None:
    """Remove the token of a daemon that stops."""
    path = token_path(socket)
    with contextlib.suppress(OSError), access.opened_directory(str(path.parent)) as directory:
        os.unlink(path.name, dir_fd=directory)


def read_token(socket: str) -> str:
    """Return the token of the daemon with a socket.

    Raises:
        TorchperfdError: There is none, or this user may not read it.
    """
    path = token_path(socket)
    try:
        with (
            access.opened_directory(str(path.parent)) as directory,
            open(access.open_file(directory, path.name, os.O_RDONLY), "rb") as file,  # noqa: PTH123
        ):
            return file.read(256).decode("ascii").strip()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise TorchperfdError(
            f"cannot read the page's token in {path}: {reason}", "ask the user who runs the daemon"
        ) from error


T = TypeVar("T")

LINK_S: Final = 60.0
_MAX_LINKS: Final = 64


class Links(Generic[T]):
    """Keys that cannot be guessed, each for one thing and for a minute; of too many the oldest is dropped."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._links: OrderedDict[str, tuple[float, T]] = OrderedDict()

    def add(self, target: T) -> str:
        """Return the path of a new link to something."""
        while len(self._links) >= _MAX_LINKS:
            self._links.popitem(last=False)
        key = secrets.token_urlsafe(24)
        self._links[key] = self._clock() + LINK_S, target
        return f"/links/{key}"

    def find(self, key: str) -> T | None:
        """Return what a link leads to; None once its minute is over."""
        until, target = self._links.get(key, (0.0, None))
        return target if self._clock() < until else None


_GOODPUT_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Parts:
    """What the interface reads.

    Attributes:
        instance: Differs between any two daemons.
        families: Returns the collectors' newest values.
        gpu_of: Returns the index of a rank's GPU on this node; empty if it is not known.
        watch: Called with the runs whose steps a page follows: at each change, and once per second while
            there are any.
    """

    store: Store
    control: ControlService
    catalog: Catalog
    coordinator: Coordinator
    node: str
    instance: str
    fleet: bool = False
    families: Callable[[], Iterable[Family]] = tuple
    samplers: Sequence[Sampler] = ()
    gpu_of: Callable[[RankIdentity], str] = lambda _: ""
    watch: Callable[[frozenset[str]], None] = lambda _: None


class Reader:
    """Asks the control service, with the rights of a caller."""

    def __init__(self, parts: Parts, clock: Callable[[], float] = time.monotonic) -> None:
        self._parts = parts
        self._clock = clock
        self._goodput: tuple[float, list[RunGoodput]] = (-_GOODPUT_S, [])

    async def run_name(self, given: str, access: Access, *, fleet: bool = False) -> str:
        """Return the whole name of a run, by a unique prefix.

        Raises:
            NoSuchTargetError: Several runs begin so.
        """
        if given in self._parts.store.runs():
            return given
        listed = await self.runs(access, fleet=fleet)
        return whole_name(given, (run.run for run in listed.runs), "run")

    async def runs(self, access: Access, *, fleet: bool = False) -> control_pb2.ListRunsResponse:
        return await self._parts.control.ListRuns(control_pb2.ListRunsRequest(fleet=fleet), access.call())

    async def steps(
        self, run: str, newest: int, access: Access, *, ranks: Sequence[int] = (), fleet: bool = False
    ) -> control_pb2.GetStepsResponse:
        request = control_pb2.GetStepsRequest(run=run, ranks=ranks, newest=newest, fleet=fleet)
        return await self._parts.control.GetSteps(request, access.call())

    async def verdicts(
        self, run: str, access: Access, *, fleet: bool = False
    ) -> control_pb2.DiagnoseResponse:
        request = control_pb2.DiagnoseRequest(run=run, fleet=fleet)
        return await self._parts.control.Diagnose(request, access.call())

    async def goodput(self, run: str = "") -> list[RunGoodput]:
        """Return how rank-seconds were spent, of one run or of all; for all at most five seconds old."""
        read_at, kept = self._goodput
        if not run and self._clock() - read_at < _GOODPUT_S:
            return kept
        request = control_pb2.GetGoodputRequest(run=run)
        answer = await self._parts.control.GetGoodput(request, Access.STRANGER.call())
        found = [run_goodput_from_message(message) for message in answer.runs]
        if not run:
            self._goodput = self._clock(), found
        return found

    def ranks(self, run: str) -> list[Rank]:
        return self._parts.store.runs().get(run, [])
