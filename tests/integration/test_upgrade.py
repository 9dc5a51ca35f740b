"""Upgrade and roll-back of a daemon under running training, between two wheels.

Clients, daemons and commands of this version and of the one before work with each other; the daemon is
replaced by the other version and back while a training process goes on.
"""

from pathlib import Path
from typing import Final

import pytest
from tests.support.node import ROOT, Node, eventually
from tests.support.wheels import build_wheel, check_out, copy_build_context, previous_version, unpack

pytestmark = [pytest.mark.slow, pytest.mark.needs("gcc")]

# Waits for its data: 40 ms of each step.
SCRIPT: Final = """
import time, torch
from torch.utils.data import DataLoader, Dataset
class Slow(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        time.sleep(0.005)
        return torch.randn(32)
model = torch.nn.Linear(32, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    for batch in DataLoader(Slow(), batch_size=8):
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
"""


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The packages of both versions, each in a directory for ``PYTHONPATH``."""
    commit = previous_version()
    if commit is None:
        pytest.skip("a shallow clone has no version before this one")
    directory = tmp_path_factory.mktemp("versions")
    check_out(commit, directory / "checkout")
    dockerfile = (ROOT / "deploy" / "docker" / "Dockerfile").read_text(encoding="utf-8")
    copy_build_context(directory / "context", dockerfile)
    previous = build_wheel(directory / "checkout", directory / "previous")
    current = build_wheel(directory / "context", directory / "current", "99.dev1+g0123456789ab")
    return {
        "previous": unpack(previous, directory / "previous"),
        "current": unpack(current, directory / "current"),
    }


@pytest.mark.parametrize("client", ["previous", "current"])
def test_daemon_is_replaced_and_rolled_back_under_training(
    node: Node, versions: dict[str, Path], tmp_path: Path, client: str
) -> None:
    (other,) = set(versions) - {client}
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    node.env["PYTHONPATH"] = str(versions[client])
    builds: list[str] = []
    captures: set[str] = set()
    node.start_daemon()
    with node.train(script=script, TORCHPERFD_RUN="upgraded") as training:
        for daemon in (client, other, client):
            if builds:
                node.stop_daemon()
                node.env["PYTHONPATH"] = str(versions[daemon])
                node.start_daemon()
            page = node.get("/metrics")[1].splitlines()
            builds.append(next(line for line in page if line.startswith("torchperfd_build_info{")))
            eventually(lambda: (node.metric("torchperfd_train_steps_total{") or 0) > 20, 60, node.log)
            for commands in versions.values():
                node.env["PYTHONPATH"] = str(commands)
                document = node.json("capture", "--steps", "3", "--run", "upgraded")
                assert document["state"] == "complete"
                captures.add(document["capture_id"])
                assert _listed(node) == captures
            eventually(lambda: "input-bound" in node.command("diagnose", "--json").stdout, 60, node.log)
        assert training.poll() is None, training.communicate()[1]
        training.kill()
        training.communicate()
    assert builds[0] == builds[2] != builds[1]


def _listed(node: Node) -> set[str]:
    return {each["capture_id"] for each in node.json("captures", "list")["captures"]}
