"""Two short real runs: kept, listed, compared, and one with the other as its baseline."""

import json
import stat
from pathlib import Path

import pytest
from tests.support.node import Node

SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
model = nn.Linear(64, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(400, 64), torch.randint(0, 8, (400,)))
for inputs, labels in DataLoader(data, batch_size=8):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs), labels).backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_two_real_runs_are_kept_and_compared(node: Node, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    first = node.command("run", "--no-daemon", "--run", "first", str(script), "--token", "secret")
    assert first.returncode == 0, first.stderr
    assert "torchperfd runs show first" in first.stderr
    report = tmp_path / "second.json"
    second = node.command(
        *("run", "--no-daemon", "--run", "second", "--quiet", "--report", str(report)),
        # A limit that no machine exceeds: what is asserted is the structure, not a time.
        *("--baseline", "fir", "--fail-above", "100000%", str(script)),
    )
    assert second.returncode == 0, second.stderr
    assert "compared with the baseline" in second.stderr

    kept = sorted((node.directory / "state/torchperfd/runs").iterdir())
    assert [file.name for file in kept] == ["first.json", "second.json"]
    assert [stat.S_IMODE(file.stat().st_mode) for file in kept] == [0o600, 0o600]
    assert "secret" not in kept[0].read_text()
    assert json.loads(kept[1].read_text()) == json.loads(report.read_text())

    listed = node.json("runs")
    assert {(each["id"], each["steps"], each["exit_state"]) for each in listed["runs"]} == {
        ("first", 50, "finished"),
        ("second", 50, "finished"),
    }
    for other in ("second", str(report)):
        document = node.json("compare", "first", other)
        assert document["schema"] == "torchperfd.run_comparison/1"
        assert (document["before"]["run"], document["after"]["run"]) == ("first", "second")
        assert {"forward", "backward", "optimizer"} & {each["phase"] for each in document["phases"]}
        assert document["differences"] == []
