"""Scenarios run alone, too, and their loop's events are written down."""

from collections.abc import Iterator

import pytest
from tests.scenarios.spy import Events, spy_on_loops
from tests.unit.client.conftest import alone

import torchperfd

__all__ = ["alone"]


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Events:
    """What happens to every loop that is made from here on."""
    return spy_on_loops(monkeypatch)


@pytest.fixture
def client(alone: None, events: Events) -> Iterator[torchperfd.Client]:
    """An attached client without faults, before and after."""
    client = torchperfd.attach()
    yield client
    assert client._faults.counts() == {}
