"""Ranks that exchange their daemons' addresses, at a real store; and jobs without one."""

import queue
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore

import torchperfd
from torchperfd.hooks import process_groups
from torchperfd.hooks.process_groups import Rendezvous
from torchperfd.v1 import session_pb2

C10D = "torch.distributed.distributed_c10d"


@pytest.fixture
def _store(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A job's store, as the ranks find it once they have met."""
    served = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    found = [PrefixStore("default_pg", PrefixStore("0", served))]
    monkeypatch.setitem(
        sys.modules, C10D, SimpleNamespace(is_initialized=lambda: True, _get_default_store=lambda: found[0])
    )
    monkeypatch.setattr(process_groups, "_PAUSES_S", (0.05,) * 200)
    yield
    # It serves for as long as anybody has it.
    found.clear()


class JobNode:
    """One node's rank."""

    def __init__(self, nodes: str = "", attempt: str = "0") -> None:
        self.reported: queue.Queue[tuple[str, ...]] = queue.Queue()
        environ = {"GROUP_WORLD_SIZE": nodes, "TORCHELASTIC_RESTART_COUNT": attempt}
        self.rendezvous = Rendezvous(lambda known: self.reported.put(tuple(known)), environ)

    def receive(self) -> set[str]:
        return set(self.reported.get(timeout=20))


@pytest.fixture
def nodes() -> Iterator[list[JobNode]]:
    made: list[JobNode] = []
    yield made
    for node in made:
        node.rendezvous.stop(5.0)


@pytest.mark.usefixtures("_store")
def test_each_node_learns_all_peers_and_ends(nodes: list[JobNode]) -> None:
    nodes += [JobNode("3") for _ in range(3)]
    for number, node in enumerate(nodes):
        node.rendezvous.discover_peers(f"node{number}:9408")
    everyone = {f"node{number}:9408" for number in range(3)}
    for node in nodes:
        received = node.receive()
        while received != everyone:
            assert received < everyone
            received = node.receive()
        assert node.rendezvous.join(10)
    assert nodes[0].reported.empty()
    nodes[0].rendezvous.discover_peers("node0:9408")
    assert nodes[0].receive() == everyone


@pytest.mark.usefixtures("_store")
def test_late_node_of_unknown_node_count_is_learned(nodes: list[JobNode]) -> None:
    nodes += [JobNode(), JobNode()]
    nodes[0].rendezvous.discover_peers("a:1")
    assert nodes[0].receive() == {"a:1"}
    nodes[1].rendezvous.discover_peers("b:1")
    assert nodes[0].receive() == {"a:1", "b:1"}


@pytest.mark.usefixtures("_store")
def test_restarted_job_does_not_learn_its_old_nodes(nodes: list[JobNode]) -> None:
    nodes += [JobNode(), JobNode(attempt="1")]
    nodes[0].rendezvous.discover_peers("gone:1")
    assert nodes[0].receive() == {"gone:1"}
    nodes[1].rendezvous.discover_peers("new:1")
    assert nodes[1].receive() == {"new:1"}


@pytest.mark.parametrize("way", ["no group yet", "in a file", "a store that has gone"])
def test_exchange_without_store_reports_nothing_and_can_end(
    way: str, nodes: list[JobNode], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gone = SimpleNamespace(host="127.0.0.1", port=1, append=None)
    store: Any = gone if way == "a store that has gone" else HashStore()
    meets = way != "no group yet"
    monkeypatch.setitem(
        sys.modules, C10D, SimpleNamespace(is_initialized=lambda: meets, _get_default_store=lambda: store)
    )
    monkeypatch.setattr(process_groups, "TIMEOUT", process_groups.TIMEOUT / 100)
    nodes.append(JobNode())
    with caplog.at_level("INFO", "torchperfd"):
        nodes[0].rendezvous.discover_peers("a:1")
        if not meets:
            nodes[0].rendezvous.stop(5.0)
        assert nodes[0].rendezvous.join(20)
    assert nodes[0].reported.empty()
    assert ("cannot be asked for" in caplog.text) == (way == "a store that has gone")


@pytest.mark.parametrize(
    ("local_rank", "address", "meets"), [(0, "a:1", True), (1, "a:1", False), (0, "", False)]
)
def test_one_rank_per_node_exchanges_peers_if_its_daemon_asks(
    client: torchperfd.Client, monkeypatch: pytest.MonkeyPatch, local_rank: int, address: str, meets: bool
) -> None:
    met: list[str] = []
    monkeypatch.setattr(client.parts.daemon_session.rendezvous, "discover_peers", met.append)
    monkeypatch.setattr(
        client.parts.daemon_session, "identity", replace(client.parts.identity, local_rank=local_rank)
    )
    client.parts.daemon_session.on_welcome(session_pb2.Welcome(fleet_address=address))
    assert met == (["a:1"] if meets else [])


def test_learned_peers_go_to_the_daemon(client: torchperfd.Client) -> None:
    client.parts.outbox.take(0, 1000)
    client.parts.daemon_session.send_peers(("a:1", "b:1"))
    (message,) = (one for one in client.parts.outbox.take(0, 1000) if one.HasField("job_daemons"))
    assert list(message.job_daemons.addresses) == ["a:1", "b:1"]
    assert not [thread for thread in threading.enumerate() if thread.name == "torchperfd-rendezvous"]
