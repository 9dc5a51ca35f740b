"""Tests that are coroutines, and fixtures that several files share."""

import asyncio
import gc
import inspect

import pytest

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
