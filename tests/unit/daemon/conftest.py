"""Tests that are coroutines, and fixtures that several files share."""

import asyncio
import gc
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.commands import Run, runner, with_socket
from tests.support.served import Served, serving_from_a_thread

from torchperfd_daemon.captures.catalog import Catalog

LIMIT_S = 120
"""How long a coroutine may take; reached by failing tests only."""


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> object:
    """Run a test that is a coroutine, within a limit of time."""
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None
    fixtures = {name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters}
    try:
        asyncio.run(asyncio.wait_for(test(**fixtures), LIMIT_S))
    finally:
        gc.collect()  # gRPC's poller thread ends with its last object, and some sit in cycles
    return True


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    return Catalog(tmp_path / "captures")


@pytest.fixture
def served() -> Iterator[Served]:
    with serving_from_a_thread() as served:
        yield served


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    return runner(capfd)


@pytest.fixture
def analyze(capfd: pytest.CaptureFixture[str]) -> Run:
    return runner(capfd, "analyze")


@pytest.fixture
def command(served: Served, run: Run) -> Run:
    """Run a command against the daemon."""
    return with_socket(run, served.socket)
