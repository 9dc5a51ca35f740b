"""What a daemon does with captures: quota, analysis and uploads."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.object_store import BUCKET, ObjectStore
from tests.support.node import EXAMPLE, Node, eventually
from tests.unit.daemon import kept
from tests.unit.daemon.kept import BASE, add, ids

from torchperfd_daemon.captures.catalog import Catalog

pytestmark = pytest.mark.slow


def test_a_daemon_keeps_to_its_quota_and_sends_what_is_left(node: Node, tmp_path: Path) -> None:
    catalog = Catalog(node.captures)
    for number in range(4):
        add(catalog, f"c{number}", {0: bytes(3_000_000)}, requested_at=BASE + number)
    assert node.command("captures", "pin", "c0").returncode == 0
    node.start_daemon("--captures-max-count", "2", "--captures-max-bytes", "1GiB")
    removed = 'torchperfd_captures_removed_total{reason="count"}'
    eventually(lambda: node.metric(removed) == 2, 30, node.log)
    assert ids(catalog) == ["c3", "c0"]
    eventually(lambda: node.metric("torchperfd_captures ") == 2, 30, node.log)
    done = node.command("captures", "get", "c3", "--remote", "--output", str(tmp_path))
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}/c3\n")
    assert (tmp_path / "c3" / "rank0.json").read_bytes() == bytes(3_000_000)


def test_daemon_on_nearly_full_disk_begins_no_capture(node: Node) -> None:
    node.start_daemon("--captures-min-free", "1000TiB")
    with node.train("--pause", "0.01") as process:
        eventually(lambda: node.metric("torchperfd_clients") == 1, 60, node.log)
        done = node.command("capture", "--steps", "2")
        assert process.poll() is None
    assert done.returncode == 1
    assert "must stay free; make room with `torchperfd captures rm --older-than 7d`" in done.stderr
    assert list(node.captures.glob("2*")) == []


ANALYSED = 'torchperfd_captures_analyses_total{result="analysed"}'


def test_a_capture_is_analysed_shown_and_listed(node: Node) -> None:
    node.start_daemon("--analyze-captures")
    with node.train("--epochs", "2000", script=EXAMPLE) as process:
        eventually(lambda: (node.metric("torchperfd_train_steps_total{") or 0) > 20, 60, node.log)
        capture_id = node.json("capture", "--steps", "3", "--with-flops", "--with-modules")["capture_id"]
        eventually(lambda: node.metric(ANALYSED) == 1, 120, node.log)
        refused = node.command("capture", "--kind", "memory")
        process.kill()
        process.communicate()
    assert refused.returncode == 1
    assert "no CUDA in this process" in refused.stderr
    listed = {each["capture_id"]: each for each in node.json("captures", "list")["captures"]}
    assert listed[capture_id]["analysed"]
    assert listed[capture_id]["options"]["with_flops"]
    assert [each["analysed"] for each in listed.values() if each["options"]["kind"] == "memory"] == [False]
    document = node.json("captures", "show", capture_id)
    assert document == json.loads((node.captures / capture_id / "analysis.json").read_text())
    assert len(document["ranks"][0]["steps"]) == 3
    phases = document["ranks"][0]["steps"][1]["phases"]
    assert {"data_us", "forward_us", "loss_us", "backward_us", "optimizer_us"} <= set(phases)
    shown = node.command("captures", "show", capture_id)
    assert shown.stdout == document["text"]
    assert "operator" in shown.stdout
    by_module = node.json("analyze", capture_id, "--group-by", "module")
    assert any(row["module"] for row in by_module["ranks"][0]["operators"])
    with_shapes = json.loads((node.captures / capture_id / "rank0.json").read_text())["traceEvents"]
    assert any("Concrete Inputs" in event.get("args", {}) for event in with_shapes)


def test_it_can_be_left_alone_and_what_is_not_analysed_says_so(node: Node) -> None:
    node.start_daemon("--no-analyze-captures")
    assert node.get("/metrics")[0] == 200
    assert node.metric(ANALYSED) is None
    kept.add(Catalog(node.captures), "one")
    missing = node.command("captures", "show", "one")
    assert (missing.returncode, missing.stderr.count("\n")) == (3, 1)
    assert "`torchperfd analyze one` does it now" in missing.stderr


@pytest.mark.parametrize("content", ["", "{", "[]", '{"ranks": []}'])
def test_a_damaged_analysis_is_one_line(node: Node, content: str) -> None:
    kept.add(Catalog(node.captures), "one")
    (node.captures / "one" / "analysis.json").write_text(content)
    damaged = node.command("captures", "show", "one")
    assert (damaged.returncode, damaged.stderr.count("\n")) == (1, 1)
    assert "is damaged" in damaged.stderr


def test_analysis_control_characters_do_not_reach_the_terminal(node: Node) -> None:
    kept.add(Catalog(node.captures), "one")
    (node.captures / "one" / "analysis.json").write_text(json.dumps({"text": "red \x1b[31m\nand on\x07\n"}))
    assert node.command("captures", "show", "one").stdout == "red ?[31m\nand on?\n"


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
