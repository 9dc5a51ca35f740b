"""The capture that ``torchperfd run`` makes by itself, with real scripts: made, analysed and shown."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.support.node import Node, eventually, import_path, new_node, torchrun

from torchperfd.launch.additions import first_advice

pytestmark = pytest.mark.slow

WITHIN_S = 180
"""How long a test waits; on a machine that is not overloaded each ends within half a minute."""
LAUNCHER = """
import sys
from torchperfd.launch import additions, runner
additions.LOOK_EVERY_S, additions._CUDA_DRIVER = 0.5, "/nowhere"
runner.main(sys.argv[1:])
"""
# Slower once the capture is ordered, so that it lasts for some seconds. Ends as the test says.
SCRIPT = """
import os, sys, time, torch
import torch.distributed as dist
from pathlib import Path
from torch.utils.data import DataLoader, Dataset

here, ends = Path(sys.argv[1]), sys.argv[2]
captures = Path(os.environ["TORCHPERFD_CAPTURES_DIR"])

def captured(pattern):
    return any(captures.glob(pattern))

class Images(Dataset):
    def __len__(self):
        return 10**9
    def __getitem__(self, index):
        time.sleep(0.3 if captured("2*-*") and not captured("2*-*/rank0.json") else 0.03)
        return torch.ones(8)

if "RANK" in os.environ:
    dist.init_process_group("gloo")
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step, images in enumerate(DataLoader(Images())):
    optimizer.zero_grad()
    model(images).sum().backward()
    optimizer.step()
    over = torch.tensor([float((here / "stop").exists() or (ends == "at once" and captured("2*-*")))])
    if dist.is_initialized():
        dist.all_reduce(over)
    if over:
        break
"""


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with new_node() as node:
        del node.env["TORCHPERFD_NO_ADVISE"]
        node.env["PYTHONPATH"] = import_path()
        (tmp_path / "launcher.py").write_text(LAUNCHER)
        (tmp_path / "train.py").write_text(SCRIPT)
        yield node


def command(tmp_path: Path, *options: str, ends: str = "on demand") -> list[str]:
    """Return the words after the interpreter that run the script."""
    return [str(tmp_path / "launcher.py"), *options, str(tmp_path / "train.py"), str(tmp_path), ends]


def manifests(node: Node) -> list[dict[str, object]]:
    return [json.loads(path.read_text()) for path in node.captures.glob("2*/manifest.json")]


def steps_of(node: Node) -> int:
    """Return how many steps the node's run has made; 0 before the daemon answers."""
    listed = node.command("ps", "--json")
    runs = json.loads(listed.stdout)["runs"] if listed.returncode == 0 else []
    return sum(rank["steps"] for run in runs for rank in run["ranks"])


def nothing_stays(node: Node) -> None:
    """Check that no process of the node is left, nor a file that was only needed meanwhile."""

    def processes() -> list[int]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("TORCHPERFD_SOCKET") == str(node.socket):
                    found.append(process.pid)
            except psutil.Error:
                continue
        return found

    eventually(lambda: not processes(), 30, lambda: str(processes()))
    assert [path for path in node.captures.rglob("*") if path.is_file() and path.name.startswith(".")] == []


def test_run_is_captured_analysed_and_named_at_its_end(node: Node, tmp_path: Path) -> None:
    """A capture of the user's during the automatic one comes after it, without `--queue`."""
    with node.running(sys.executable, *command(tmp_path)) as process:
        eventually(lambda: [*node.captures.glob("2*")], WITHIN_S)
        users = node.command("capture", "--steps", "1")
        assert users.returncode == 0, users.stderr
        assert "begins when the run's automatic capture has ended" in users.stderr
        [automatic] = [each for each in manifests(node) if each["trigger"] == "automatic"]
        assert (automatic["state"], automatic["reason"]) == ("complete", "")
        analysis = node.captures / str(automatic["capture_id"]) / "analysis.json"
        eventually(analysis.exists, WITHIN_S)
        eventually(lambda: '"in_workers"' in node.command("diagnose", "--json").stdout, WITHIN_S)
        (tmp_path / "stop").touch()
        _, errors = process.communicate(timeout=WITHIN_S)
    assert process.returncode == 0, errors
    [sleeps] = [at for at, line in enumerate(SCRIPT.splitlines(), 1) if "time.sleep" in line]
    assert f"  line  train.py:{sleeps} in __getitem__" in errors
    # A capture that came before the loader was sampled has no advice on it.
    words = "trace five steps that the run captured by itself: "
    assert (words in " ".join(errors.split())) == bool(first_advice(analysis.read_bytes()))
    [newest] = [each for each in manifests(node) if each["trigger"] == "command"]
    assert f"  next  torchperfd analyze {newest['capture_id']}" in errors
    # The user's is not analysed by a daemon that shares the run's cores.
    assert [*node.captures.glob("2*/analysis.json")] == [analysis]
    nothing_stays(node)


def test_run_without_advice_is_not_captured(node: Node, tmp_path: Path) -> None:
    with node.running(sys.executable, *command(tmp_path, "--no-advise")) as process:
        eventually(lambda: steps_of(node) > 100, WITHIN_S)
        (tmp_path / "stop").touch()
        _, errors = process.communicate(timeout=WITHIN_S)
    assert "INPUT-BOUND" in errors
    assert [*node.captures.glob("2*")] == []
    nothing_stays(node)


def test_run_that_ends_during_the_capture_just_ends(node: Node, tmp_path: Path) -> None:
    with node.running(sys.executable, *command(tmp_path, ends="at once")) as process:
        _, errors = process.communicate(timeout=WITHIN_S)
    assert process.returncode == 0, errors
    assert "INPUT-BOUND" in errors
    assert "torchperfd analyze" not in errors
    [manifest] = manifests(node)
    assert manifest["state"] == "failed"
    assert [*node.captures.glob("2*/*.json")] != []
    assert [*node.captures.glob("2*/rank0.json")] == []
    nothing_stays(node)


def test_job_of_two_ranks_captures_one_once(node: Node, tmp_path: Path) -> None:
    with node.running(*torchrun(2), *command(tmp_path)) as process:
        eventually(lambda: [*node.captures.glob("2*/analysis.json")], WITHIN_S)
        (tmp_path / "stop").touch()
        _, errors = process.communicate(timeout=WITHIN_S)
    assert process.returncode == 0, errors
    [manifest] = manifests(node)
    assert (manifest["trigger"], manifest["state"], manifest["world_size"]) == ("automatic", "complete", 2)
    assert len([*node.captures.glob("2*/rank*.json")]) == 2, "a trace and its manifest"
    assert errors.count("torchperfd analyze") == 1
    nothing_stays(node)
