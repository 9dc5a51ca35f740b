"""A script that waits for its device in each step: the report names the line and the time."""

import json
from pathlib import Path

from tests.support.node import Node, import_path

SCRIPT = """\
import torch
from benchmarks.simulated_device import install

device = install()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for _ in range(40):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    device.compute.launch_kernel(0.1)
    device.compute.synchronize()
"""


def test_report_names_the_line_that_waits_for_the_device(node: Node, tmp_path: Path) -> None:
    script, report = tmp_path / "train.py", tmp_path / "report.json"
    script.write_text(SCRIPT)
    node.env["PYTHONPATH"] = import_path()
    done = node.command("run", "--no-daemon", "--report", str(report), str(script))
    assert done.returncode == 0, done.stderr
    (rank,) = json.loads(report.read_text())["ranks"]
    (wait,) = rank["sync_waits"]
    line = SCRIPT.splitlines().index("    device.compute.synchronize()") + 1
    assert (wait["file"], wait["line"], wait["call"]) == (str(script), line, "synchronize")
    assert 0 < wait["seconds_total"] <= rank["train"]["step_seconds_total"]
    assert f"most of it in synchronize() at train.py:{line}" in " ".join(done.stderr.split())
