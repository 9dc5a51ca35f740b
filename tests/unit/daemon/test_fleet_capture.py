"""A capture over nodes: one conducts, each keeps its own manifest, who is lost is named."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.support.node import free_port
from tests.support.values import some
from tests.unit.daemon.fleet_nodes import RUN, PlayedNode, PlayedRank, asking, may_all, none_here, start_node

from torchperfd.v1 import contract, fleet_pb2, fleet_pb2_grpc, session_pb2
from torchperfd_daemon.captures.coordinator import Coordinator
from torchperfd_daemon.captures.manifest import CaptureOptions, CaptureRecord, CaptureState
from torchperfd_daemon.fleet.addresses import Address
from torchperfd_daemon.fleet.view import FleetView
from torchperfd_daemon.service.message_receiver import CommandHandler

ID = "20260101-000000-abcdef"


async def capture(
    view: FleetView, coordinator: Coordinator, ranks: Sequence[int] = (), timeout: float = 30.0
) -> CaptureRecord:
    record = None
    async with view.gather("", ranks, none_here, may_all) as gathered:
        options = CaptureOptions(steps=3)
        async for progress in coordinator.capture(gathered.run, gathered.participants, options, timeout):
            record = progress.record
    return some(record)


def manifest(node: PlayedNode, capture_id: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((node.catalog.folder(capture_id) / "manifest.json").read_text())
    return found


async def test_nodes_capture_the_same_steps_with_a_manifest_each(tmp_path: Path) -> None:
    nodes = [await start_node(tmp_path, ranks, 3) for ranks in ([0, 1], [2])]
    async with asking(tmp_path, [node.address for node in nodes]) as (view, coordinator):
        record = await capture(view, coordinator)
    assert record.state is CaptureState.COMPLETE
    assert [rank.rank for rank in record.ranks] == [0, 1, 2]
    start, end = some(record.step_range)
    assert start > 12  # the farthest rank is there
    for node in nodes:
        for rank in node.ranks:
            assert rank.reported == ["prepare", f"commit {start}+{end - start}"]
            assert rank.directory == node.catalog.directory / record.capture_id
        own = manifest(node, record.capture_id)
        assert (own["state"], own["trigger"], own["step_range"]) == ("complete", "fleet", [start, end])
        assert [rank["rank"] for rank in own["ranks"]] == [rank.rank for rank in node.ranks]
        assert node.coordinator.counts.active == 0
        await node.server.stop(None)
    assert any(rank.clock_offset_ns for rank in record.ranks)
    assert all(abs(rank.clock_offset_ns) < 10**10 for rank in record.ranks)


async def test_only_the_requested_ranks_get_the_capture(tmp_path: Path) -> None:
    nodes = [await start_node(tmp_path, [rank], 3) for rank in range(3)]
    async with asking(tmp_path, [node.address for node in nodes]) as (view, coordinator):
        record = await capture(view, coordinator, ranks=[0, 2])
    assert [rank.rank for rank in record.ranks] == [0, 2]
    assert nodes[1].ranks[0].reported == []
    for node in nodes:
        await node.server.stop(None)


async def test_ranks_on_no_node_fail_by_name(tmp_path: Path) -> None:
    node = await start_node(tmp_path, [1], 3)
    dead = Address("127.0.0.1", free_port())
    async with asking(tmp_path, [node.address, dead]) as (view, coordinator):
        record = await capture(view, coordinator)
    assert record.state is CaptureState.PARTIAL
    assert [rank.state.value for rank in record.ranks] == ["failed", "complete", "failed"]
    assert all(str(dead) in record.ranks[absent].reason for absent in (0, 2))
    await node.server.stop(None)


async def test_peer_that_dies_during_capture_fails_its_ranks_by_name(tmp_path: Path) -> None:
    nodes = [await start_node(tmp_path, [rank], 2) for rank in range(2)]
    nodes[1].ranks[0].finishes = False
    async with asking(tmp_path, [node.address for node in nodes]) as (view, coordinator):
        capturing = asyncio.create_task(capture(view, coordinator))
        await nodes[1].ranks[0].committed.wait()
        await nodes[1].server.stop(None)
        record = await capturing
    assert record.state is CaptureState.PARTIAL
    assert record.ranks[1].state is CaptureState.FAILED
    assert str(nodes[1].address) in record.ranks[1].reason
    await nodes[0].server.stop(None)


async def test_a_node_in_the_middle_of_its_own_capture_says_so(tmp_path: Path) -> None:
    nodes = [await start_node(tmp_path, [rank], 2) for rank in range(2)]
    async with asking(tmp_path, [node.address for node in nodes]) as (view, coordinator):
        with nodes[0].coordinator.reserve_run(RUN):
            record = await capture(view, coordinator)
        assert "in progress" in record.ranks[0].reason
        assert (await capture(view, coordinator)).state is CaptureState.COMPLETE
    for node in nodes:
        await node.server.stop(None)


async def test_nodes_may_share_their_captures_directory(tmp_path: Path) -> None:
    node = await start_node(tmp_path, [0], 1)
    async with asking(tmp_path, [node.address]) as (view, coordinator):
        node.catalog.directory.parent.joinpath("asking").mkdir()
        node.catalog.directory = tmp_path / "asking"
        record = await capture(view, coordinator)
    assert record.state is CaptureState.COMPLETE
    assert manifest(node, record.capture_id)["trigger"] == "command"
    await node.server.stop(None)


def prepare(capture_id: str = ID, run: str = RUN, rank: int = 0, steps: int = 3) -> fleet_pb2.TakeOrder:
    options = session_pb2.CaptureOptions(steps=steps)
    order = session_pb2.PrepareCapture(capture_id=capture_id, options=options, directory="/etc")
    return fleet_pb2.TakeOrder(prepare=fleet_pb2.TakePrepare(run=run, rank=rank, prepare=order))


async def send(node: PlayedNode, *orders: fleet_pb2.TakeOrder) -> tuple[list[fleet_pb2.TakeReport], str]:
    """Return what a node reports upon orders, and the code that the stream ends with."""
    begin = fleet_pb2.TakeOrder(
        begin=fleet_pb2.TakeBegin(api=session_pb2.ApiRange(min=contract.API_MIN, max=contract.API_MAX))
    )
    reports = []
    async with grpc.aio.insecure_channel(str(node.address)) as channel:
        stub: Any = fleet_pb2_grpc.FleetStub(channel)
        call = stub.Take(iter([begin, *orders]))
        try:
            reports = [report async for report in call]
        except grpc.aio.AioRpcError as error:
            return reports, error.code().name
    return reports, "OK"


async def test_a_conductor_that_goes_away_is_what_the_manifest_says(tmp_path: Path) -> None:
    node = await start_node(tmp_path, [0], 1)
    _, code = await send(node, prepare())
    assert code == "OK"
    own = manifest(node, ID)
    assert (own["state"], own["ranks"][0]["reason"]) == (
        "failed",
        "the connection to the daemon that conducts the capture is lost",
    )
    assert node.ranks[0].reported[-1].startswith("cancel")
    assert node.ranks[0].directory == node.catalog.directory / ID
    await node.server.stop(None)


@pytest.mark.parametrize(
    "order",
    [
        prepare(capture_id=""),
        prepare(capture_id="../escape"),
        prepare(capture_id="/etc"),
        prepare(capture_id="a\0b"),
        prepare(capture_id="x" * 81),
        prepare(capture_id="x" * 200_000),
        prepare(steps=0),
        prepare(steps=2**31),
        prepare(capture_id="taken"),
    ],
    ids=lambda order: repr(order.prepare.prepare.capture_id[:12]),
)
async def test_what_no_daemon_would_say_is_refused_and_leaves_nothing(
    tmp_path: Path, order: fleet_pb2.TakeOrder
) -> None:
    node = await start_node(tmp_path, [0], 1)
    node.catalog.create("taken")
    node.catalog.save(CaptureRecord("taken", RUN, "command", 1.0, CaptureState.COMPLETE))
    before = sorted(tmp_path.rglob("*"))
    _, code = await send(node, order)
    assert code == "INVALID_ARGUMENT"
    assert node.ranks[0].reported == []
    assert sorted(tmp_path.rglob("*")) == before
    await node.server.stop(None)


async def test_stream_serves_one_capture_and_answers_unknown_ranks(tmp_path: Path) -> None:
    node = await start_node(tmp_path, [0], 1)
    _, code = await send(node, prepare(), prepare(capture_id="another"))
    assert code == "INVALID_ARGUMENT"
    assert not node.catalog.folder("another").exists()
    reports, code = await send(node, prepare(capture_id="third", rank=2**32 - 1))
    assert code == "OK"
    (ack,) = [report.ack for report in reports if report.HasField("ack")]
    assert not ack.ack.ready
    assert "not on this node" in ack.ack.reason
    await node.server.stop(None)


async def test_peer_of_other_protocol_or_without_start_is_refused(tmp_path: Path) -> None:
    node = await start_node(tmp_path, [0], 1)
    async with grpc.aio.insecure_channel(str(node.address)) as channel:
        stub: Any = fleet_pb2_grpc.FleetStub(channel)
        future = fleet_pb2.TakeBegin(api=session_pb2.ApiRange(min=900, max=901))
        for first, code in (
            (fleet_pb2.TakeOrder(begin=future), grpc.StatusCode.FAILED_PRECONDITION),
            (prepare(), grpc.StatusCode.INVALID_ARGUMENT),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.Take(iter([first])).read()
            assert refused.value.code() is code
    await node.server.stop(None)


async def test_the_script_of_rank_0_captures_the_ranks_of_other_nodes(tmp_path: Path) -> None:
    node = await start_node(tmp_path, [1, 2], 4)
    async with asking(tmp_path, [node.address]) as (view, coordinator):
        zero = PlayedRank(0, 4, coordinator)
        handler = CommandHandler(coordinator, lambda run: [zero] if run == RUN else [], view)
        reported: asyncio.Queue[session_pb2.CaptureOrderResult] = asyncio.Queue()
        options = session_pb2.CaptureOptions(steps=3)
        order = session_pb2.CaptureOrder(order_id=7, options=options, timeout_seconds=30)
        handler.on_order(zero, RUN, order, reported.put_nowait)
        while not (last := await reported.get()).ended:
            pass
    assert (last.state, last.steps) == ("partial", 3)
    assert [(rank.rank, rank.file, rank.node) for rank in last.ranks] == [
        (0, "rank0.json", ""),
        (1, "rank1.json", "node1"),
        (2, "rank2.json", "node1"),
        (3, "", ""),
    ]
    assert last.reason.startswith("rank 3: it is on no node that answers")
    (first, second) = node.ranks
    assert zero.reported == first.reported == second.reported
    await node.server.stop(None)
