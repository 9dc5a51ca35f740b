"""A node of its own for each test that asks for one."""

from tests.integration.conftest import node  # noqa: F401 - a fixture
