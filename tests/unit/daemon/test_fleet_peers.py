"""What ``--fleet-peers`` can say, and what it comes to."""

import asyncio
import itertools
import json
import os
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchperfd_daemon.errors import TorchperfdError, UsageError
from torchperfd_daemon.fleet.addresses import Address, expand_hostlist, parse_address
from torchperfd_daemon.fleet.credentials import Credentials, Tls
from torchperfd_daemon.fleet.peers import (
    LISTS,
    MAX_PER_USER,
    JobPeers,
    Peers,
    TargetsFile,
    check_trust,
    parse_peers,
    parse_targets,
)
from torchperfd_daemon.store.model import ProcessKey, RankIdentity
from torchperfd_daemon.store.store import Rank

LITERAL = st.text("abcxyz._", min_size=1, max_size=4)
RANGE = st.tuples(st.integers(0, 30), st.integers(0, 4), st.integers(1, 3))
BRACKET = st.lists(RANGE, min_size=1, max_size=3)
ELEMENT = st.tuples(LITERAL, st.lists(st.tuples(BRACKET, st.text("ab-", max_size=2)), max_size=3))


@given(st.lists(ELEMENT, min_size=1, max_size=4))
def test_a_hostlist_expands_to_what_it_was_written_for(elements: list) -> None:  # type: ignore[type-arg]
    text, names = [], []
    for literal, brackets in elements:
        written, choices = literal, [[literal]]
        for ranges, after in brackets:
            parts, numbers = [], []
            for first, more, width in ranges:
                parts.append(f"{first:0{width}}-{first + more:0{width}}" if more else f"{first:0{width}}")
                # Slurm keeps the width that the first number is written with.
                written_width = len(f"{first:0{width}}")
                numbers += [f"{number:0{written_width}}" for number in range(first, first + more + 1)]
            written += f"[{','.join(parts)}]{after}"
            choices += [numbers, [after]]
        text.append(written)
        names += ["".join(choice) for choice in itertools.product(*choices)]
    assert expand_hostlist(",".join(text)) == names


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node1", ["node1"]),
        (
            "node[01-03,12],gpu-[1-2]-[3-4]",
            ["node01", "node02", "node03", "node12", "gpu-1-3", "gpu-1-4", "gpu-2-3", "gpu-2-4"],
        ),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[08-11].rack", ["n08.rack", "n09.rack", "n10.rack", "n11.rack"]),
    ],
)
def test_hostlists_as_slurm_writes_them(text: str, names: list[str]) -> None:
    assert expand_hostlist(text) == names


@pytest.mark.parametrize(
    "text",
    ["", ",", "a,", "n[", "n]", "n[]", "n[1-]", "n[3-1]", "n[1,]", "n[[1]]", "n[a]", "n 1", "../etc", "n\0"],
)
def test_what_is_no_hostlist_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a Slurm hostlist"):
        expand_hostlist(text)


@pytest.mark.parametrize("text", ["n[0-999999999]", "n[0-99][0-99][0-99]", ",".join(["n[1-100]"] * 101)])
def test_a_hostlist_that_explodes_is_refused_before_it_does(text: str) -> None:
    with pytest.raises(UsageError, match="more than 10,000 hosts"):
        expand_hostlist(text)


@given(st.text("n1a[],-09 \0é", max_size=40))
def test_no_text_breaks_the_hostlist_parser(text: str) -> None:
    try:
        names = expand_hostlist(text)
    except UsageError:
        return
    assert names
    assert all(name and "[" not in name and "," not in name for name in names)


@given(st.binary(max_size=60) | st.recursive(st.none() | st.text(), st.lists).map(json.dumps).map(str.encode))
def test_no_document_breaks_the_reading_of_targets(document: bytes) -> None:
    try:
        found = parse_targets(document)
    except UsageError:
        return
    assert all(isinstance(each, Address) for each in found)


def test_targets_of_all_groups_count_and_labels_do_not() -> None:
    document = [
        {"targets": ["node1:9408", "[fd00::1]:9408"], "labels": {"rack": "a"}},
        {"targets": []},
        {"targets": ["10.0.0.3:1"]},
    ]
    found = parse_targets(json.dumps(document).encode())
    assert [str(each) for each in found] == ["node1:9408", "[fd00::1]:9408", "10.0.0.3:1"]


@pytest.mark.parametrize(
    "text",
    ["", ":", "node1", ":9408", "node1:", "node1:99999", "node1:9408x", "a/b:1", "[::1:9408", "[nonsense]:1",
     "unix:/tmp/x", "n" * 10_000_000 + ":1", "a:b:1", "node1\0:1"],
)  # fmt: skip
def test_what_is_no_address_is_refused_in_one_short_line(text: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_address(text)
    assert len(str(refused.value)) < 300
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("0.0.0.0", False),
     ("::", False), ("10.0.0.1", False), ("localhost.example.com", False)],
)  # fmt: skip
def test_only_this_node_reaches_a_loopback_address(host: str, loopback: bool) -> None:
    assert Address(host, 9408).is_loopback is loopback


def read(text: str, environ: dict[str, str] | None = None) -> list[str]:
    source = parse_peers(text, environ)
    assert not isinstance(source, JobPeers)
    return [str(each) for each in asyncio.run(source.read())]


def test_each_form_of_peers(tmp_path: Path) -> None:
    path = tmp_path / "peers.json"
    path.write_text('[{"targets": ["b:1", "a:2"]}]')
    assert read("a:1,b:2") == ["a:1", "b:2"]
    assert read(f"file:{path}") == ["b:1", "a:2"]
    assert read("dns:127.0.0.1:9408") == ["127.0.0.1:9408"]
    assert read("slurm:node[1-2],x:77") == ["node1:77", "node2:77", "x:77"]
    assert read("slurm:env", {"SLURM_JOB_NODELIST": "n[1-2]"}) == ["n1:9408", "n2:9408"]
    assert read("slurm:env:80", {"SLURM_JOB_NODELIST": "n[1-2]"}) == ["n1:80", "n2:80"]


@pytest.mark.parametrize(
    "text", ["", ",", "file:", "dns:x", "slurm:n[1-:9408", "slurm:env:x", "node1", "a:1,b"]
)
def test_peers_that_cannot_be_meant_are_refused_at_once(text: str) -> None:
    with pytest.raises(UsageError):
        parse_peers(text)


@pytest.mark.parametrize(
    ("text", "own", "address"),
    [
        ("job", Address("10.0.0.1", 9408), "10.0.0.1:9408"),
        ("job", Address("0.0.0.0", 80), f"{socket.gethostname()}:80"),
        ("job", Address("::", 80), f"{socket.gethostname()}:80"),
        ("job:front:9408", Address("0.0.0.0", 80), "front:9408"),
        ("job:front:9408", None, "front:9408"),
    ],
)
def test_ranks_pass_on_where_others_reach_their_daemon(text: str, own: Address | None, address: str) -> None:
    peers = parse_peers(text, own=own)
    assert isinstance(peers, JobPeers)
    assert str(peers.address) == address


@pytest.mark.parametrize("own", [None, Address("10.0.0.1", 0)])
def test_unreachable_daemon_is_not_passed_on(own: Address | None) -> None:
    with pytest.raises(UsageError, match="reach this daemon"):
        parse_peers("job", own=own)


ADA, BOB = 1001, 1002


def rank_of(uid: int, number: int = 0, run: str = "bert-17") -> Rank:
    identity = RankIdentity(run=run, rank=number)
    return Rank(identity, 0.0, ProcessKey.of(identity, uid, 1))


def asked_for(peers: JobPeers, *uids: int) -> list[str]:
    return [*map(str, asyncio.run(peers.addresses(lambda uid: uid in uids)))]


def test_peers_of_ranks_count_while_they_are_here() -> None:
    peers = JobPeers(Address("a", 1))
    one, two = rank_of(ADA), rank_of(ADA, 1)
    assert asked_for(peers, ADA) == []
    peers.on_addresses(one, ["a:1", "b:1"])
    peers.on_addresses(two, ["a:1", "c:1"])
    peers.on_addresses(two, ["c:1", "a:1", "d:1"])
    assert asked_for(peers, ADA) == ["a:1", "b:1", "c:1", "d:1"]
    peers.forget(one)
    peers.forget(one)
    assert asked_for(peers, ADA) == ["c:1", "a:1", "d:1"]
    del two
    assert asked_for(peers, ADA) == []
    assert peers.dropped == 0


def test_only_peers_of_the_callers_ranks_are_asked() -> None:
    peers = JobPeers(Address("a", 1))
    ada, bob = rank_of(ADA), rank_of(BOB)
    peers.on_addresses(ada, ["a:1"])
    peers.on_addresses(bob, ["b:1"])
    assert asked_for(peers, ADA) == ["a:1"]
    assert asked_for(peers, BOB) == ["b:1"]
    assert asked_for(peers, ADA, BOB) == ["a:1", "b:1"]
    assert asked_for(peers) == []


def test_peers_of_a_user_are_limited_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """Two ranks with 20,000 peers: the fleet is still asked, for their user and for others."""
    peers = JobPeers(Address("a", 9408))
    ada, bobs = rank_of(ADA), [rank_of(BOB, number) for number in range(2)]
    peers.on_addresses(ada, ["node1:9408", "node2:9408"])
    for number, bob in enumerate(bobs):
        peers.on_addresses(bob, [f"10.{number}.{each // 250}.{each % 250}:9408" for each in range(9999)])
    assert asked_for(peers, ADA) == ["node1:9408", "node2:9408"]
    assert len(asked_for(peers, ADA, BOB)) == MAX_PER_USER + 2
    assert peers.dropped == 2 * 9999 - MAX_PER_USER
    assert len(caplog.messages) == 1
    # All agents of a job on this node report the same list.
    again = rank_of(BOB, 2)
    peers.on_addresses(again, [f"10.0.{each // 250}.{each % 250}:9408" for each in range(MAX_PER_USER)])
    assert peers.dropped == 2 * 9999 - MAX_PER_USER


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nowhere",
        "node1",
        "node1:0",
        "node1:22",
        "169.254.169.254:80",
        "127.0.0.1:9409",
        "[::1]:6379",
        "a b:9408",
    ],
)
def test_addresses_of_other_services_are_dropped(text: str) -> None:
    peers, rank = JobPeers(Address("10.0.0.1", 9408)), rank_of(BOB)
    peers.on_addresses(rank, [text, "node2:9408"])
    assert asked_for(peers, BOB) == ["node2:9408"]
    assert peers.dropped == 1


def test_another_port_of_loopback_needs_a_listener_of_the_user() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        for uid, found in ((os.getuid(), [f"127.0.0.1:{port}"]), (BOB, [])):
            peers, rank = JobPeers(Address("127.0.0.1", 9408)), rank_of(uid)
            peers.on_addresses(rank, [f"127.0.0.1:{port}", f"10.0.0.1:{port}"])
            assert asked_for(peers, uid) == found
        elsewhere, rank = JobPeers(Address("10.0.0.1", 9408)), rank_of(os.getuid())
        elsewhere.on_addresses(rank, [f"127.0.0.1:{port}"])
        assert asked_for(elsewhere, os.getuid()) == []


def test_frequent_lists_of_daemons_are_dropped() -> None:
    peers, rank = JobPeers(Address("a", 1)), rank_of(BOB)
    for _ in range(int(LISTS.burst)):
        peers.on_addresses(rank, ["a:1"])
    assert peers.dropped == 0
    for _ in range(10):
        peers.on_addresses(rank, ["a:1", "b:1"])
    assert asked_for(peers, BOB) == ["a:1"]
    assert peers.dropped == 20


def test_check_trust_of_a_secret_without_tls_is_refused() -> None:
    tls = Tls(b"", b"", b"")
    for trusted in (Credentials(), Credentials(tls=tls), Credentials("a" * 16, tls)):
        check_trust(trusted)
    with pytest.raises(UsageError, match="secret"):
        check_trust(Credentials("a" * 16))


@pytest.mark.parametrize("text", ["file:/nonexistent/peers.json", "slurm:env"])
def test_peers_that_are_not_there_are_a_clean_error_when_asked(text: str) -> None:
    with pytest.raises(TorchperfdError, match="peers"):
        read(text, {})


def test_peers_are_read_again_but_not_at_every_question(tmp_path: Path) -> None:
    now = [0.0]
    path = tmp_path / "peers.json"
    path.write_text('[{"targets": ["a:1", "a:1"]}]')
    source = parse_peers(f"file:{path}")
    assert isinstance(source, TargetsFile)
    peers = Peers(source, clock=lambda: now[0])
    assert asyncio.run(peers.addresses(lambda _: False)) == (Address("a", 1),)
    path.write_text('[{"targets": ["b:1"]}]')
    now[0] = 4.9
    assert asyncio.run(peers.addresses(lambda _: False)) == (Address("a", 1),)
    now[0] = 5.0
    assert asyncio.run(peers.addresses(lambda _: False)) == (Address("b", 1),)
