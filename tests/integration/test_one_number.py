"""The number of workers that a real run is advised: in card, trace line, analysis, page, record and tune."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.node import Node, eventually, import_path, new_node

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WITHIN_S = 240
LAUNCHER = """
import sys
from torchperfd.launch import additions, runner
additions.LOOK_EVERY_S, additions._CUDA_DRIVER = 2.0, "/nowhere"
runner.main(sys.argv[1:])
"""
SCRIPT = """
import pathlib, sys, time, torch
from torch.utils.data import DataLoader, Dataset

class Waits(Dataset):
    def __len__(self):
        return 10**7
    def __getitem__(self, index):
        time.sleep(0.004)
        return torch.ones(16)

def main():
    stop = pathlib.Path(sys.argv[1])
    torch.set_num_threads(1)
    model = torch.nn.Linear(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for inputs in DataLoader(Waits(), batch_size=8, shuffle=True):
        optimizer.zero_grad()
        model(inputs).sum().backward()
        optimizer.step()
        time.sleep(0.006)
        if stop.exists():
            break

if __name__ == "__main__":
    main()
"""


def numbers(text: str) -> set[str]:
    return set(re.findall(r"num_workers=(\d+)", text))


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with new_node() as node:
        del node.env["TORCHPERFD_NO_ADVISE"]
        node.env["PYTHONPATH"] = import_path()
        node.env["TORCHPERFD_RUNS_DIR"] = str(tmp_path / "runs")
        (tmp_path / "launcher.py").write_text(LAUNCHER)
        (tmp_path / "train.py").write_text(SCRIPT)
        yield node


def test_real_run_is_advised_one_number_everywhere(node: Node, tmp_path: Path) -> None:
    script, stop = str(tmp_path / "train.py"), tmp_path / "stop"
    # A run's name makes its report a kept one.
    words = [sys.executable, str(tmp_path / "launcher.py"), "--run", "one", script, str(stop)]
    shown: list[str] = []
    with node.running(*words) as process:
        eventually(lambda: [*node.captures.glob("2*/analysis.json")], WITHIN_S)
        for _ in range(5):
            shown.append(node.command("diagnose").stdout)
        stop.touch()
        _, errors = process.communicate(timeout=WITHIN_S)
    assert process.returncode == 0, errors
    [advised] = numbers(" ".join(errors.split())) or ["none"]
    for live in shown:
        assert numbers(live) <= {advised}
    trace = " ".join(errors.split()).partition("that the run captured by itself: ")[2]
    assert f"num_workers={advised}," in trace

    [capture] = [path.parent.name for path in node.captures.glob("2*/analysis.json")]
    page = tmp_path / "page.html"
    assert numbers(node.command("analyze", capture).stdout) == {advised}
    node.command("analyze", capture, "--html", str(page))
    assert numbers(page.read_text()) == {advised}

    kept = json.loads(node.command("runs", "show", "one", "--json").stdout)
    assert numbers(kept["verdict"]["fix"]) == {advised}
    assert kept["loader_advice"]["advice"]["workers"] == int(advised)

    stop.unlink()
    options = ("--only", "loader", "--seconds", "0.3", "--limit", "25", "--json")
    tuned = node.command("tune", *options, script, str(stop), timeout=WITHIN_S)
    found = json.loads(tuned.stdout)
    assert (found["advised_by"], found["advised_workers"]) == ("one", int(advised))
