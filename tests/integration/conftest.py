"""Real nodes for integration tests."""

from collections.abc import Iterator

import pytest
from tests.node import Node


@pytest.fixture
def node() -> Iterator[Node]:
    """A node without a daemon; start one with ``node.start_daemon()``."""
    node = Node()
    # It would load the processors while the next test runs; who tests it says so.
    node.options = ("--no-analyze-captures",)
    yield node
    node.close()
