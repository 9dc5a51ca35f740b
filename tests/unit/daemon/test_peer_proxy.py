"""The proxy at the socket: callers are known, and no user has more connections than allowed."""

import asyncio
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from tests.support.served import (
    GIVE_UP_S,
    RankStream,
    Served,
    connected,
    control,
    serving,
    short_directory,
    with_daemon,
)
from tests.unit.daemon.host_tree import HostTree

from torchperfd.v1 import control_pb2
from torchperfd_daemon.collectors.process import own_namespace
from torchperfd_daemon.collectors.procfs import parse_stat, read
from torchperfd_daemon.rpc import peer_proxy
from torchperfd_daemon.rpc.callers import (
    Caller,
    CallerDirectory,
    UserLimit,
    has_ended,
    is_process,
    read_caller,
)

OWN_TICKS = parse_stat(read("/proc/self/stat")).start_ticks
OWN_NAMESPACE = own_namespace(Path("/proc"))


def test_read_caller_returns_what_the_kernel_says() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        caller = read_caller(ours)
    assert (caller.uid, caller.pid, caller.start_ticks) == (os.getuid(), os.getpid(), OWN_TICKS)
    assert caller.groups == {os.getgid(), *os.getgroups()}
    assert caller.gid == os.getgid()


@with_daemon
async def test_a_session_has_the_user_and_process_of_its_connection(
    served: Served, channel: grpc.aio.Channel
) -> None:
    rank = RankStream(channel)
    await rank.join(pid=os.getpid(), pid_namespace=OWN_NAMESPACE, process_start_ticks=OWN_TICKS)
    liar = RankStream(channel)
    await liar.join(rank=1, pid=1, pid_namespace=OWN_NAMESPACE)
    elsewhere = RankStream(channel)
    await elsewhere.join(rank=2, pid=1, pid_namespace=OWN_NAMESPACE + 1)
    ranks = list(served.store.ranks())
    assert [each.process.uid for each in ranks] == [os.getuid()] * 3
    assert [each.process.peer_pid for each in ranks] == [os.getpid()] * 3
    # Nothing is read of a process that it is not.
    assert [each.is_process_known for each in ranks] == [True, False, True]
    for each in (rank, liar, elsewhere):
        await each.leave()


@pytest.mark.parametrize(
    ("pid", "namespace", "ticks", "is_true"),
    [
        (7, OWN_NAMESPACE, 5, True),
        (7, 0, 5, True),
        (7, OWN_NAMESPACE, 0, True),
        (7, OWN_NAMESPACE, 6, False),
        (8, OWN_NAMESPACE, 5, False),
        (8, 0, 5, False),
        (8, OWN_NAMESPACE + 1, 6, True),
    ],
)
def test_is_process_of_a_caller_believes_the_kernel(
    pid: int, namespace: int, ticks: int, is_true: bool, tmp_path: Path
) -> None:
    tree = HostTree(tmp_path)
    tree.add_process(7)
    claimed = tree.namespace + namespace - OWN_NAMESPACE if namespace else 0
    assert is_process(Caller(1000, 7, 5, gid=100), pid, claimed, ticks, tree.proc) is is_true


@pytest.mark.parametrize("namespace", [0, OWN_NAMESPACE + 1])
def test_is_process_of_a_caller_that_changed_users_is_false(namespace: int, tmp_path: Path) -> None:
    tree = HostTree(tmp_path)
    tree.add_process(7, users="1000 0 0 0")
    assert not is_process(Caller(1000, 7, 5, gid=100), 7, namespace, 5, tree.proc)


def test_has_ended_is_true_of_dead_processes_only() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        ticks = parse_stat(read(f"/proc/{child.pid}/stat")).start_ticks
        alive = Caller(0, child.pid, ticks)
        assert not has_ended(alive)
        assert has_ended(Caller(0, child.pid, ticks + 1)), "another process has its id"
        assert not has_ended(Caller(0, child.pid, 0)), "it could not be seen"
    assert has_ended(alive)


def test_user_limit_counts_users_apart_and_together() -> None:
    limit = UserLimit("sessions", 2, 3)
    assert [bool(limit.admit(uid)) for uid in (1, 1, 1, 2, 2)] == [False, False, True, False, True]
    limit.dismiss(1)
    assert limit.admit(2) == ""
    assert limit.admit(3) == "there are 3 sessions, the most that all users may have"
    assert limit.admit(2) == "this user has 2 sessions, the most that one user may have"


async def test_connections_beyond_the_limit_are_closed() -> None:
    async with connected(CallerDirectory(4, 100)) as (served, channel):
        await control(channel).GetInfo(control_pb2.GetInfoRequest())
        open_ones = []
        for number in range(4):
            reader, writer = await asyncio.open_unix_connection(served.socket)
            open_ones.append(writer)
            if number == 3:
                assert await asyncio.wait_for(reader.read(), GIVE_UP_S) == b""
        for writer in open_ones:
            writer.close()
        # The connections that were there are served on.
        await control(channel).GetInfo(control_pb2.GetInfoRequest())


@with_daemon
async def test_a_connection_that_says_nothing_is_closed(
    served: Served, channel: grpc.aio.Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchperfd_daemon.rpc.peer_proxy._SILENCE_S", 0.05)
    reader, writer = await asyncio.open_unix_connection(served.socket)
    assert await asyncio.wait_for(reader.read(), GIVE_UP_S) == b""
    writer.close()


@with_daemon
async def test_the_private_socket_is_the_daemons_alone(served: Served, channel: grpc.aio.Channel) -> None:
    private = Path(served.socket).with_name(".d.sock.rpc")
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    # Of who comes another way nothing is known, so that it may do nothing.
    async with grpc.aio.insecure_channel(f"unix:{private}") as direct:
        rank = RankStream(direct)
        await rank.join()
        [kept] = served.store.ranks()
        assert (kept.process.uid, kept.is_process_known) == (None, False)
        await rank.leave()


async def test_a_socket_that_a_dead_daemon_left_is_replaced() -> None:
    with short_directory() as directory, socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(directory / "d.sock"))
        dead.listen(1)
        async with (
            serving(directory) as served,
            grpc.aio.insecure_channel(f"unix:{served.socket}") as channel,
        ):
            await control(channel).GetInfo(control_pb2.GetInfoRequest())


def test_caller_directory_forgets_disconnected_callers() -> None:
    directory = CallerDirectory(1, 1)

    class Call:
        def peer(self) -> str:
            return "unix-abstract:a"

    assert directory.admit("unix-abstract:a", Caller(5)) == ""
    assert directory.find(Call()).uid == 5
    directory.dismiss("unix-abstract:a")
    directory.dismiss("unix-abstract:a")
    assert directory.find(Call()).uid is None
    assert directory.admit("unix-abstract:b", Caller(5)) == ""


class FakeConnection:
    """A connection of a user, as the proxy counts it."""

    def __init__(self, uid: int) -> None:
        self.caller = Caller(uid, 7)
        self.unfinished = 0
        self.aborted = False

    def abort(self) -> None:
        self.aborted = True


def test_messages_that_never_end_close_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_proxy, "MAX_UNFINISHED_BYTES", 100_000)
    callers = CallerDirectory(9, 9)
    with socket.socket(socket.AF_UNIX) as listener:
        proxy = peer_proxy.PeerProxy(listener, "", callers)
    bobs: list[Any] = [FakeConnection(1002) for _ in range(3)]
    ada: Any = FakeConnection(1001)
    for connection in (*bobs, ada):
        proxy.open.add(connection)
    proxy.by_name["unix-abstract:ada"] = ada
    for number, connection in enumerate(bobs):
        proxy.add_unfinished(connection, 30_000 + number)
    for _ in range(100):
        # Messages that arrive whole leave nothing.
        proxy.add_unfinished(ada, 9_000)
        callers.received(SimpleNamespace(peer=lambda: "unix-abstract:ada"), 8_900)
    assert not any(connection.aborted for connection in (*bobs, ada))
    proxy.add_unfinished(bobs[0], 20_000)
    assert [connection.aborted for connection in bobs] == [True, False, False]
    assert ada.unfinished == 0
    proxy.remove_unfinished(bobs[1], bobs[1].unfinished)
    proxy.remove_unfinished(bobs[2], bobs[2].unfinished)
    assert proxy.unfinished_bytes == 0
