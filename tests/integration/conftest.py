"""Real nodes for integration tests."""

from collections.abc import Iterator

import pytest
from tests.support.node import Node, new_node


@pytest.fixture
def node() -> Iterator[Node]:
    """A node without a daemon; start one with ``node.start_daemon()``."""
    with new_node() as node:
        yield node
