"""A daemon whose object store is away, and which is killed meanwhile, uploads every capture in the end."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.object_store import BUCKET, ObjectStore
from tests.support.node import Node, eventually
from tests.unit.daemon.kept import BASE, add

from torchperfd_daemon.captures import Catalog

pytestmark = pytest.mark.slow


@pytest.fixture
def store(node: Node, tmp_path: Path) -> Iterator[ObjectStore]:
    """A store that does not run yet, and that the node's daemon will look for."""
    store = ObjectStore(tmp_path)
    node.env.update(store.environment)
    yield store
    store.stop()


def uploaded(node: Node) -> dict[str, str]:
    """Return the state of each capture's upload in `captures list`."""
    return {each["capture_id"]: each["uploaded"] for each in node.json("captures", "list")["captures"]}


def test_uploads_survive_store_outage_and_daemon_kill(node: Node, store: ObjectStore) -> None:
    catalog = Catalog(node.captures)
    for number in range(3):
        add(catalog, f"c{number}", {0: bytes(100_000), 1: bytes(6_000_000)}, requested_at=BASE + number)
    options = ("--captures-upload", f"s3://{BUCKET}/a", "--captures-max-count", "1")
    node.start_daemon(*options)
    failed, done = '{result="failed"}', '{result="uploaded"}'
    eventually(lambda: (node.metric(f"torchperfd_captures_uploads_total{failed}") or 0) >= 1, 30, node.log)
    assert node.metric("torchperfd_captures_upload_pending") == 3
    assert uploaded(node) == {f"c{number}": "pending" for number in range(3)}
    assert "capture c0 is not uploaded yet: " in node.log()
    assert node.stop_daemon(signal.SIGKILL) == -signal.SIGKILL
    store.start()
    node.start_daemon(*options)
    # Before it has looked what there is, nothing is pending, either.
    eventually(lambda: node.metric(f"torchperfd_captures_uploads_total{done}") == 3, 30, node.log)
    assert node.metric("torchperfd_captures_upload_pending") == 0
    assert store.held() == [
        f"a/c{number}/{name}" for number in range(3) for name in ("manifest.json", "rank0.json", "rank1.json")
    ]
    assert set(uploaded(node).values()) == {"yes"}
    # What comes later goes too, and by hand at once.
    add(catalog, "later", requested_at=BASE + 9)
    by_hand = node.command("captures", "upload", "later")
    assert (by_hand.returncode, by_hand.stdout) == (0, f"s3://{BUCKET}/a/later\n"), by_hand.stderr
    assert "a/later/manifest.json" in store.held()
    assert node.stop_daemon() == 0


def test_a_daemon_stops_in_time_while_its_store_hangs(node: Node, store: ObjectStore) -> None:
    store.start()
    add(Catalog(node.captures), "one", {0: bytes(6_000_000)})
    store.pause()
    node.start_daemon("--captures-upload", f"s3://{BUCKET}/a")
    eventually(lambda: node.metric("torchperfd_captures_upload_pending") == 1, 30, node.log)
    assert node.stop_daemon() == 0
    assert "Traceback" not in node.log()
    assert uploaded(node) == {"one": "pending"}


def test_a_daemon_says_at_once_that_it_cannot_upload_there(node: Node) -> None:
    daemon = node.start_daemon("--captures-upload", "s3:/bucket", wait=False)
    assert daemon.wait(30) == 2
    node.daemon = None
    assert "write it like s3://bucket/prefix" in node.log()
