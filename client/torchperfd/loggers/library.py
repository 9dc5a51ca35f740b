"""Importing a tracker's library when it is first needed."""

from importlib import import_module
from typing import Any


def library(name: str, package: str) -> Any:
    """Return a module that is not a dependency of ours.

    Args:
        package: What pip calls its distribution.

    Raises:
        ImportError: It is not installed; the message has the command that installs it.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise ImportError(f"{error}; pip install {package}") from error
