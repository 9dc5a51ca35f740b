"""The daemon analyses what it captures, on its own and out of everybody's way."""

import json
import sys

import pytest
from tests.support.node import EXAMPLE, Node, eventually
from tests.unit.daemon import kept

from torchperfd_daemon.captures import Catalog

pytestmark = pytest.mark.slow

ANALYSED = 'torchperfd_captures_analyses_total{result="analysed"}'


def test_a_capture_is_analysed_shown_and_listed(node: Node) -> None:
    node.start_daemon("--analyze-captures")
    script = (sys.executable, "-m", "torchperfd", "run", "--quiet", str(EXAMPLE), "--epochs", "2000")
    with node.running(*script) as process:
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
