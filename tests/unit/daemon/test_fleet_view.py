"""The view over all nodes: runs, stacks, credentials, builds and clock offsets."""

from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.node import free_port
from tests.support.values import some
from tests.unit.daemon.fleet_nodes import RUN, asking, certificates, may_all, none_here, start_node

from torchperfd.v1 import control_pb2
from torchperfd_daemon.errors import NoSuchTargetError, TorchperfdError, UsageError
from torchperfd_daemon.fleet.addresses import Address
from torchperfd_daemon.fleet.credentials import Credentials, check_listening, parse_tokens, read_credentials
from torchperfd_daemon.fleet.peers import Dns
from torchperfd_daemon.fleet.relay import ClockOffset, Exchange
from torchperfd_daemon.fleet.transport import FanOut
from torchperfd_daemon.fleet.view import FleetView
from torchperfd_daemon.views.documents import builds_text

TOKEN = "0123456789abcdef0123456789abcdef"


async def test_runs_of_all_nodes_are_one_list_and_the_dead_are_named(tmp_path: Path) -> None:
    first = await start_node(tmp_path, [0, 2], 4)
    second = await start_node(tmp_path, [1, 3], 4)
    dead = Address("127.0.0.1", free_port())
    # A node may be known by two names.
    twice = Address("localhost", first.address.port)
    async with asking(tmp_path, [first.address, dead, second.address, twice]) as (view, _):
        for _ in range(2):
            listed = await view.runs([], may_all)
            (run,) = listed.runs
            assert [rank.identity.rank for rank in run.ranks] == [0, 1, 2, 3]
            assert (run.run, run.world_size) == (RUN, 4)
            assert [(node.node, node.ranks) for node in listed.nodes] == [
                ("asking", 0),
                ("node0", 2),
                ("node1", 2),
            ]
            assert [peer.address for peer in listed.unreachable] == [str(dead)]
        assert listed.unreachable[0].reason == "connection refused"
    for node in (first, second):
        await node.server.stop(None)


async def test_a_peer_that_comes_back_is_asked_again(tmp_path: Path) -> None:
    node = await start_node(tmp_path, [0], 1)
    async with asking(tmp_path, [node.address]) as (view, _):
        assert not (await view.runs([], may_all)).unreachable
        await node.server.stop(None)
        assert [peer.address for peer in (await view.runs([], may_all)).unreachable] == [str(node.address)]
        back = await start_node(tmp_path, [0], 1, address=node.address)
        while (await view.runs([], may_all)).unreachable:
            pass
        await back.server.stop(None)


async def test_stacks_of_a_run_come_from_every_node_that_has_it(tmp_path: Path) -> None:
    nodes = [await start_node(tmp_path, [rank], 3) for rank in range(3)]
    dead = Address("127.0.0.1", free_port())
    async with asking(tmp_path, [*(node.address for node in nodes), dead]) as (view, _):
        assert await view.choose("", [], may_all) == RUN
        request = control_pb2.StacksRequest(run=RUN, ranks=[0, 2], timeout_seconds=5)
        reported = [message async for message in view.stacks(request, may_all)]
    assert [message.identity.rank for message in reported[:-1]] == [0, 2]
    assert reported[-1].unreachable.address == str(dead)
    for node in nodes:
        await node.server.stop(None)


async def test_daemon_without_peers_reports_that(tmp_path: Path) -> None:
    async with asking(tmp_path, []) as (_, coordinator):
        view = FleetView(None, FanOut(Credentials), coordinator, "i", "n")
        with pytest.raises(UsageError, match="--fleet-peers"):
            await view.runs([], may_all)


async def test_unknown_run_and_impossible_rank_are_named(tmp_path: Path) -> None:
    node = await start_node(tmp_path, [0], 1)
    async with asking(tmp_path, [node.address]) as (view, _):
        with pytest.raises(NoSuchTargetError, match="no run other on any node"):
            async with view.gather("other", (), none_here, may_all):
                pass
        with pytest.raises(NoSuchTargetError, match="run job has no rank 7"):
            async with view.gather("", (0, 7), none_here, may_all):
                pass
    await node.server.stop(None)


async def test_only_callers_with_the_token_are_answered(tmp_path: Path) -> None:
    node = await start_node(tmp_path, [0], 1, Credentials(TOKEN))
    for token, let_in in ((TOKEN, True), (TOKEN[:-1], False), ("", False)):
        async with asking(tmp_path, [node.address], Credentials(token)) as (view, _):
            listed = await view.runs([], may_all)
            assert len(listed.nodes) == 1 + let_in
            if not let_in:
                assert "token" in listed.unreachable[0].reason
                with pytest.raises(NoSuchTargetError, match="token"):
                    async with view.gather(RUN, (), none_here, may_all):
                        pass
    await node.server.stop(None)


@pytest.mark.needs("openssl")
async def test_tls_needs_certificates_of_one_authority_on_both_sides(tmp_path: Path) -> None:
    ours, theirs = (certificates(tmp_path, name) for name in ("ours", "theirs"))
    node = await start_node(tmp_path, [0], 1, ours)
    for credentials, let_in in ((ours, True), (theirs, False), (Credentials(), False)):
        async with asking(tmp_path, [node.address], credentials) as (view, _):
            listed = await view.runs([], may_all)
            assert (len(listed.nodes), len(listed.unreachable)) == ((2, 0) if let_in else (1, 1))
    await node.server.stop(None)


@pytest.mark.needs("openssl")
async def test_certificate_has_the_name_that_peers_were_found_by(tmp_path: Path) -> None:
    by_name = certificates(tmp_path, "named", "DNS:localhost")
    node = await start_node(tmp_path, [0], 1, by_name)
    port = node.address.port
    found = next(each for each in await Dns("localhost", port).read() if each.host == "127.0.0.1")
    other = replace(found, certified_name="elsewhere")
    for address, reached in ((found, 2), (node.address, 1), (other, 1)):
        async with asking(tmp_path, [address], by_name) as (view, _):
            assert len((await view.runs([], may_all)).nodes) == reached
    await node.server.stop(None)


def test_beyond_loopback_only_with_credentials() -> None:
    for host in ("0.0.0.0", "10.0.0.1", "::"):
        with pytest.raises(UsageError, match="--fleet-token-file"):
            check_listening(Address(host, 9408), Credentials())
        check_listening(Address(host, 9408), Credentials(TOKEN))
    check_listening(Address("127.0.0.1", 9408), Credentials())


async def test_an_address_in_use_is_a_clean_error(tmp_path: Path) -> None:
    node = await start_node(tmp_path, [0], 1)
    with pytest.raises(TorchperfdError, match="--fleet-address"):
        await start_node(tmp_path, [1], 1, address=node.address)
    await node.server.stop(None)


@pytest.mark.parametrize(
    "content", [b"", b"short", b"0123456789 abcdef", b"\xff" * 32, b"a" * 5000, b"a\0" * 16]
)
def test_what_is_no_secret_is_refused(content: bytes) -> None:
    with pytest.raises(UsageError):
        parse_tokens(content)


def test_credentials_that_are_half_there_are_refused(tmp_path: Path) -> None:
    assert parse_tokens(TOKEN.encode() + b"\n") == (TOKEN,)
    with pytest.raises(UsageError, match="three files"):
        read_credentials(None, tmp_path / "cert", None, None)
    with pytest.raises(TorchperfdError, match="cannot read"):
        read_credentials(tmp_path / "none", None, None, None)
    assert TOKEN not in repr(Credentials(TOKEN))


@pytest.mark.parametrize("size", [300_000, 10_000_000])
async def test_a_message_that_is_too_large_is_refused(tmp_path: Path, size: int) -> None:
    node = await start_node(tmp_path, [0], 1)
    async with grpc.aio.insecure_channel(str(node.address)) as channel:
        call = channel.unary_stream("/torchperfd.v1.Fleet/Stacks", None, None)(bytes(size))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await node.server.stop(None)


def node(name: str, version: str = "0.2.0", revision: str = "6ba749a4c0de") -> control_pb2.FleetNode:
    return control_pb2.FleetNode(node=name, version=version, revision=revision)


def test_builds_text_one_build_is_empty() -> None:
    assert builds_text([node("n1"), node("n2")]) == ""
    assert builds_text([]) == ""


def test_builds_text_names_nodes_of_each_build() -> None:
    nodes = [node("n1"), node("n2", revision="1111aaaa2222"), node("n3", "0.1.0", ""), node("n4")]
    assert builds_text(nodes) == (
        "the nodes run different builds of torchperfd: 0.2.0 (6ba749a4c0de) on n1, n4;"
        " 0.2.0 (1111aaaa2222) on n2; 0.1.0 on n3"
    )


def test_builds_text_many_nodes_are_counted() -> None:
    nodes = [*(node(f"n{index}") for index in range(198)), node("old-1", "0.1.0"), node("old-2", "0.1.0")]
    assert builds_text(nodes).endswith(
        ": 0.2.0 (6ba749a4c0de) on 198 nodes; 0.1.0 (6ba749a4c0de) on old-1, old-2"
    )


NS = st.integers(0, 10**9)


@given(st.integers(-(10**15), 10**15), st.lists(st.tuples(NS, NS, NS), min_size=1, max_size=20))
def test_clock_offset_error_is_within_half_the_quickest_exchange(
    offset: int, ways: list[tuple[int, int, int]]
) -> None:
    clock, now = ClockOffset(), 10**18
    for there, busy, back in ways:
        received = now + there + offset
        clock.add(Exchange(now, received, received + busy, now + there + busy + back))
        now += 10**9
    assert abs(some(clock.ns) - offset) <= min(there + back for there, _, back in ways) // 2 + 1


def test_answer_older_than_its_question_is_ignored() -> None:
    clock = ClockOffset()
    clock.add(Exchange(1000, 50, 60, 900))
    assert clock.ns is None
