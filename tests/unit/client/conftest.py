"""No test of the client meets a real daemon, or takes this machine for a rank of a job."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import torchperfd
import torchperfd.attachment


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Leave the process without launcher and daemon, as subprocesses inherit it; detach at the end."""
    for name in (*os.environ,):
        if name.startswith(("TORCHPERFD_", "SLURM_", "TORCHELASTIC_", "GRPC_")) or name in _LAUNCHER:
            monkeypatch.delenv(name)
    monkeypatch.setenv("TORCHPERFD_SOCKET", str(tmp_path / "absent.sock"))
    monkeypatch.setenv("TORCHPERFD_CAPTURES_DIR", str(tmp_path / "captures"))
    yield
    client = torchperfd.attachment.current()
    if client is not None:
        client.detach()


@pytest.fixture
def client(alone: None) -> torchperfd.Client:
    """An attached client."""
    return torchperfd.attach()


_LAUNCHER = {
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("NODE_NAME", "POD_UID", "XDG_RUNTIME_DIR", "XDG_STATE_HOME"),
}
