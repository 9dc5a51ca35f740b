"""A daemon acts of its own accord: on a job whose loader becomes slow, and then hangs."""

import json
from typing import Any

import pytest
from tests.support.node import Node, eventually

pytestmark = pytest.mark.slow

SCRIPT = """
import os, pathlib, time, torch
flag = pathlib.Path(os.environ["FLAG"])
def fetch():
    mode = flag.read_text() if flag.exists() else ""
    time.sleep({"": 0.001, "slow": 0.1, "hang": 600.0}[mode])
    return torch.ones(8, 16)
class Samples(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True:
            yield fetch()
model = torch.nn.Linear(16, 16)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for batch in torch.utils.data.DataLoader(Samples(), batch_size=None):
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.step()
    time.sleep(0.02)
"""

CONFIG = """
[[trigger]]
name = "loader-slow"
when = "metric"
metric = "torchperfd_train_phase_seconds_total"
labels = { phase = "data" }
above = 0.25
steps = 2

[[trigger]]
when = "stall"
for = "3s"
"""


def captures(node: Node) -> dict[str, Any]:
    return {each["trigger"]: each for each in node.json("captures", "list")["captures"]}


def test_a_slow_loader_is_captured_and_a_hang_leaves_stacks(node: Node) -> None:
    config, script, flag = (node.directory / name for name in ("torchperfd.toml", "train.py", "flag"))
    config.write_text(CONFIG)
    script.write_text(SCRIPT)
    node.start_daemon("--config", str(config))
    with node.train(script=script, FLAG=str(flag)) as process:
        eventually(lambda: (node.metric("torchperfd_train_steps_total") or 0) > 100, 60, node.log)
        assert captures(node) == {}
        flag.write_text("slow")
        fired = 'torchperfd_triggers_total{result="fired",rule="loader-slow"}'
        eventually(lambda: node.metric(fired) == 1, 90, node.log)
        captured = captures(node)["loader-slow"]
        assert captured["state"] == "complete"
        assert captured["step_range"][1] - captured["step_range"][0] == 2
        trace = node.captures / captured["capture_id"] / captured["ranks"][0]["file"]
        assert json.loads(trace.read_bytes())["traceEvents"]

        flag.write_text("hang")
        fired = 'torchperfd_triggers_total{result="fired",rule="stall"}'
        eventually(lambda: node.metric(fired) == 1, 60, node.log)
        assert process.poll() is None
        process.kill()
    captured = captures(node)["stall"]
    assert captured["state"] == "complete"
    folder = node.captures / captured["capture_id"]
    assert "train.py:6 in fetch" in (folder / "stacks.txt").read_text()
    document = json.loads((folder / "stacks.json").read_bytes())
    assert document["ranks"][0]["phase"] == "data"
    assert node.log().count("trigger loader-slow fired: ") == 1
