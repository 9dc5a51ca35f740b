"""Several ranks, with the real torchrun and gloo."""

import json
from pathlib import Path

import pytest
from tests.support.node import Node, eventually, torchrun

SCRIPT = """
import sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
data = TensorDataset(torch.randn(128, 32), torch.randint(0, 4, (128,)))
model = DistributedDataParallel(torch.nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(int(sys.argv[1])):
    for x, y in DataLoader(data, batch_size=16, num_workers=1):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
dist.destroy_process_group()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "ddp.py"
    path.write_text(SCRIPT)
    return path


def _torchrun(*arguments: str) -> list[str]:
    return [
        *torchrun(2),
        *("-m", "torchperfd", "run", *arguments),
    ]


def test_ps_shows_one_run_with_two_ranks_and_nothing_else(node: Node, script: Path) -> None:
    node.start_daemon()
    with node.running(*_torchrun(str(script), "400")) as process:
        eventually(lambda: node.metric("torchperfd_clients") == 2, 60, node.log)
        eventually(lambda: (node.metric("torchperfd_train_steps_total{") or 0) > 20, 60, node.log)
        # Each rank reports once a second, in its own time.
        eventually(lambda: all(rank["steps"] for rank in node.json("ps")["runs"][0]["ranks"]), 10, node.log)
        (run,) = node.json("ps")["runs"]
        capture = node.json("capture", "--steps", "4")
        process.terminate()
        process.communicate(timeout=30)
    assert run["world_size"] == 2
    assert [rank["rank"] for rank in run["ranks"]] == [0, 1]
    assert len({rank["pid"] for rank in run["ranks"]}) == 2
    assert all(rank["steps"] for rank in run["ranks"])
    assert capture["state"] == "complete"
    assert [rank["state"] for rank in capture["ranks"]] == ["complete", "complete"]
    first, after = capture["step_range"]
    for rank in capture["ranks"]:
        text = Path(rank["path"]).read_text()
        assert all(f"ProfilerStep#{step}" in text for step in range(first, after))


def test_embedded_daemon_serves_both_ranks_and_rank_0_reports(
    node: Node, script: Path, tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    with node.running(
        *_torchrun("--report", str(report), str(script), "10"), TORCHPERFD_RUN="pair"
    ) as process:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    document = json.loads(report.read_text())
    assert document["run"] == "pair"
    assert [(rank["rank"], rank["train"]["steps"]) for rank in document["ranks"]] == [(0, 80), (1, 80)]
    assert errors.count("── torchperfd · run pair ──") == 1
    eventually(lambda: node.command("ps").returncode == 4, 10)
