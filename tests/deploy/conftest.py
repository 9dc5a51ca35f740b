"""A node of its own for each test that asks for one, and a Debian for those that share it."""

import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

import pytest
from tests.deploy.debian_folder import STAND_IN, bootstrap
from tests.integration.conftest import node  # noqa: F401 - a fixture

OF_OPERATORS: Final = ("curl", "iproute2", "sudo")
"""What the pages of deploy/ and their tests use."""

# The same for all workers of pytest-xdist, which are children of one process.
# pytest would keep the directories of three runs.
_RUN: Final = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
_SHARED: Final = Path(tempfile.gettempdir(), f"torchperfd-debian-{_RUN}")


@pytest.fixture(scope="session")
def debian12() -> Path:
    """A folder with Debian 12, Python and systemd, made once for all workers; tests copy it."""
    _SHARED.mkdir(exist_ok=True)
    folder = _SHARED / "bookworm"
    with (_SHARED / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            bootstrap("bookworm", (*STAND_IN, "systemd", *OF_OPERATORS), _SHARED / "unfinished")
            (_SHARED / "unfinished").rename(folder)
    return folder


def pytest_sessionfinish() -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        shutil.rmtree(_SHARED, ignore_errors=True)
