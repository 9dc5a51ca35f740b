"""A daemon holds the captures directory to its quota, and sends what is in it."""

import sys
from pathlib import Path

import pytest
from tests.support.node import Node, eventually
from tests.unit.daemon.kept import BASE, add, ids

from torchperfd_daemon.captures import Catalog

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
    script = node.directory / "train.py"
    script.write_text(
        "import time, torch\n"
        "model = torch.nn.Linear(4, 4)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "while True:\n"
        "    optimizer.zero_grad(); model(torch.ones(2, 4)).sum().backward(); optimizer.step()\n"
        "    time.sleep(0.01)\n"
    )
    with node.running(sys.executable, "-m", "torchperfd", "run", str(script)) as process:
        eventually(lambda: node.metric("torchperfd_clients") == 1, 60, node.log)
        done = node.command("capture", "--steps", "2")
        assert process.poll() is None
    assert done.returncode == 1
    assert "must stay free; make room with `torchperfd captures rm --older-than 7d`" in done.stderr
    assert list(node.captures.glob("2*")) == []
