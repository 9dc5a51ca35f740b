"""The daemon's gRPC side in this process, for tests: real services on a real unix socket."""

import asyncio
import contextlib
import functools
import gc
import inspect
import shutil
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import grpc
from grpc_health.v1.health import aio as health  # type: ignore[attr-defined]

from torchperfd.v1 import control_pb2_grpc, session_pb2, session_pb2_grpc
from torchperfd_daemon.captures.catalog import Catalog
from torchperfd_daemon.captures.coordinator import Coordinator
from torchperfd_daemon.config.options import ServeSettings
from torchperfd_daemon.diagnosis.verdict import Verdict
from torchperfd_daemon.fleet.credentials import Credentials
from torchperfd_daemon.fleet.transport import FanOut
from torchperfd_daemon.fleet.view import FleetView
from torchperfd_daemon.metrics.health import CallCounts
from torchperfd_daemon.rpc.callers import CallerDirectory
from torchperfd_daemon.rpc.server import RpcServer, caller_directory
from torchperfd_daemon.service.control import ControlService
from torchperfd_daemon.service.permissions import Permissions
from torchperfd_daemon.service.session import Node, SessionService
from torchperfd_daemon.store.store import Store

P = ParamSpec("P")
T = TypeVar("T")

GIVE_UP_S = 20
"""How long a test waits for what must come; reached by failing tests only."""


@dataclass
class Served:
    """A daemon's parts behind a socket."""

    socket: str
    store: Store
    catalog: Catalog
    coordinator: Coordinator
    sessions: SessionService
    control: ControlService
    checks: Any
    callers: CallerDirectory
    verdicts: dict[str, Verdict]
    calls: CallCounts


@contextlib.contextmanager
def short_directory() -> Iterator[Path]:
    """A directory whose path leaves room for a socket's name; pytest's own are too long."""
    directory = Path(tempfile.mkdtemp(prefix="tpd-"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory)
        gc.collect()  # grpc.aio ends its poller thread with its last object, and some sit in cycles


@contextlib.asynccontextmanager
async def serving(directory: Path, callers: CallerDirectory | None = None) -> AsyncIterator[Served]:
    """Serve on a socket in a directory, on the running loop."""
    settings = ServeSettings(socket=str(directory / "d.sock"), captures_dir=directory / "captures")
    store = Store()
    catalog = Catalog(settings.captures_dir)
    coordinator = Coordinator(catalog)
    node = Node("node-a", "http://127.0.0.1:9407/metrics", settings.captures_dir)
    callers = callers or caller_directory(settings)
    verdicts: dict[str, Verdict] = {}
    sessions = SessionService(store, coordinator, node, lambda: None, callers=callers)
    alone = FleetView(None, FanOut(Credentials), coordinator, "", node.name)
    control = ControlService(
        store,
        sessions,
        coordinator,
        catalog,
        node,
        alone,
        verdict=verdicts.get,
        permissions=Permissions(callers),
    )
    checks = health.HealthServicer()
    calls = CallCounts()
    server = RpcServer(settings, callers, sessions, control, checks, calls)
    await server.start()
    try:
        yield Served(
            settings.socket, store, catalog, coordinator, sessions, control, checks, callers, verdicts, calls
        )
    finally:
        await server.stop(None)


@contextlib.asynccontextmanager
async def connected(callers: CallerDirectory | None = None) -> AsyncIterator[tuple[Served, grpc.aio.Channel]]:
    """Serve in a directory of its own, and connect."""
    with short_directory() as directory:
        async with (
            serving(directory, callers) as served,
            grpc.aio.insecure_channel(f"unix:{served.socket}") as channel,
        ):
            yield served, channel


def with_daemon(
    test: Callable[Concatenate[Served, grpc.aio.Channel, P], Awaitable[None]],
) -> Callable[P, Awaitable[None]]:
    """Give a test its first two parameters; the others are fixtures."""

    async def run(*arguments: P.args, **fixtures: P.kwargs) -> None:
        async with connected() as (served, channel):
            await test(served, channel, *arguments, **fixtures)

    return with_fixtures_of(test, 2, run)


def with_fixtures_of(test: Callable[..., object], given: int, run: Callable[P, T]) -> Callable[P, T]:
    """Let pytest see a test in place of a function that gives the test its first parameters."""
    functools.update_wrapper(run, test)
    signature = inspect.signature(test)
    # pytest would look for the first ones among the fixtures.
    fixtures = list(signature.parameters.values())[given:]
    vars(run)["__signature__"] = signature.replace(parameters=fixtures)
    return run


@contextlib.contextmanager
def from_a_thread(opened: Callable[[Path], AbstractAsyncContextManager[T]]) -> Iterator[T]:
    """Keep open in another thread what is served, for commands, whose calls block this one."""
    reported: list[tuple[asyncio.AbstractEventLoop, asyncio.Event, T]] = []
    started = threading.Event()

    async def serve(directory: Path) -> None:
        async with opened(directory) as there:
            stop = asyncio.Event()
            reported.append((asyncio.get_running_loop(), stop, there))
            started.set()
            await stop.wait()

    with short_directory() as directory:
        thread = threading.Thread(target=lambda: asyncio.run(serve(directory)))
        thread.start()
        assert started.wait(GIVE_UP_S)
        loop, stop, there = reported[0]
        try:
            yield there
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join()


def serving_from_a_thread() -> AbstractContextManager[Served]:
    """Serve from another thread, for commands, whose calls block this one."""
    return from_a_thread(serving)


def hello(run: str = "bert-17", rank: int = 0, **more: Any) -> session_pb2.ClientMessage:
    """Return what a client of this version begins with."""
    identity = {"run": run, "rank": rank, "world_size": 2, "node": "node-a", "pid": 100 + rank, **more}
    return session_pb2.ClientMessage(
        hello=session_pb2.Hello(
            api=session_pb2.ApiRange(min=1, max=1),
            client_version="0.1.0",
            identity=session_pb2.RankIdentity(**identity),
        )
    )


class RankStream:
    """A training process's end of a session."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.call: Any = session_pb2_grpc.SessionStub(channel).Attach()  # type: ignore[call-arg]

    async def say(self, *messages: session_pb2.ClientMessage) -> None:
        """Send."""
        for message in messages:
            await asyncio.wait_for(self.call.write(message), GIVE_UP_S)

    async def receive(self) -> session_pb2.DaemonMessage:
        """Return the daemon's next message."""
        message = await asyncio.wait_for(self.call.read(), GIVE_UP_S)
        assert isinstance(message, session_pb2.DaemonMessage), "the daemon ended the session"
        return message

    async def join(self, run: str = "bert-17", rank: int = 0, **more: Any) -> session_pb2.Welcome:
        """Say hello and return the welcome."""
        await self.say(hello(run, rank, **more))
        return (await self.receive()).welcome

    async def refused(self) -> tuple[grpc.StatusCode, str]:
        """Return the status that the daemon ends the session with."""
        code = await asyncio.wait_for(self.call.code(), GIVE_UP_S)
        return code, await self.call.details()

    async def leave(self) -> None:
        """Say goodbye and wait until the daemon has taken note."""
        await self.say(session_pb2.ClientMessage(goodbye=session_pb2.Goodbye(reason="done")))
        while isinstance(await asyncio.wait_for(self.call.read(), GIVE_UP_S), session_pb2.DaemonMessage):
            pass


def control(channel: grpc.aio.Channel) -> Any:
    """Return a stub of the control service; its type knows only the blocking calls."""
    return control_pb2_grpc.ControlStub(channel)


def columns(*rows: Sequence[int]) -> list[bytes]:
    """Pack rows of integers as the wire's columns."""
    return [b"".join(value.to_bytes(8, "little", signed=True) for value in row) for row in rows]


def steps_message(
    durations_ns: Sequence[int], kinds: Sequence[int] | None = None, **phases: Sequence[int]
) -> session_pb2.ClientMessage:
    """Return a batch of steps, back to back from second 1000 on."""
    count = len(durations_ns)
    starts = [1_000_000_000_000 + sum(durations_ns[:position]) for position in range(count)]
    kind, start, duration = columns(kinds or [session_pb2.STEP_KIND_TRAIN] * count, starts, durations_ns)
    return session_pb2.ClientMessage(
        steps=session_pb2.StepBatch(
            count=count,
            kind=kind,
            start_ns=start,
            duration_ns=duration,
            phases=[session_pb2.PhaseColumn(phase=name, ns=columns(row)[0]) for name, row in phases.items()],
        )
    )
