"""Values in tests."""

from typing import TypeVar

T = TypeVar("T")


def some(value: T | None) -> T:
    """Return a value that must not be None, of the type without it."""
    assert value is not None
    return value
