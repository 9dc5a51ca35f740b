"""A node of its own for each test that asks for one, and a Debian for those that share it."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from tests.deploy.debian_folder import STAND_IN, bootstrap
from tests.integration.conftest import node  # noqa: F401 - a fixture

OF_OPERATORS: Final = ("curl", "iproute2", "sudo")
"""What the pages of deploy/ and their tests use."""


@pytest.fixture(scope="session")
def debian12() -> Iterator[Path]:
    """A folder with Debian 12, Python and systemd; tests copy it."""
    # pytest would keep the directories of three runs.
    directory = Path(tempfile.mkdtemp(prefix="torchperfd-debian-"))
    try:
        bootstrap("bookworm", (*STAND_IN, "systemd", *OF_OPERATORS), directory / "bookworm")
        yield directory / "bookworm"
    finally:
        shutil.rmtree(directory)
