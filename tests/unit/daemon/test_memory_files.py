"""Files in memory that another process shares."""

import os
from pathlib import Path

import pytest

from torchperfd.v1 import contract
from torchperfd_daemon.collectors import procfs


@pytest.mark.parametrize("kind", ["fifo", "file"])
def test_open_memory_file_by_a_false_link_opens_nothing(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    false = tmp_path / "false"
    os.mkfifo(false) if kind == "fifo" else false.write_bytes(bytes(16))
    process = tmp_path / "proc"
    (process / "fd").mkdir(parents=True)
    (process / "fd" / "3").symlink_to(false)
    monkeypatch.setattr(os, "readlink", lambda _: f"/memfd:{contract.STACKS_FILE} (deleted)")
    # Opening the FIFO would wait for a writer that never comes.
    assert procfs.open_memory_file(process, contract.STACKS_FILE, os.O_RDONLY) is None
