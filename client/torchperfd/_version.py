"""The version of the whole distribution, and what of it is compiled."""

import os.path
from importlib.machinery import EXTENSION_SUFFIXES
from typing import Final

__version__ = "0.1.0"

NATIVE_MODULES: Final = ("events/_native", "steps/_templates")
"""Compiled when the package is built, if there is a compiler; paths in this package, without their ending."""


def missing_native_modules(package: str = os.path.dirname(__file__)) -> list[str]:  # noqa: PTH120 - import time
    """Return the native modules that this installation lacks; Python does their work, at ten times the cost.

    Args:
        package: The directory of the client's package.
    """
    return [
        name
        for name in NATIVE_MODULES
        if not any(os.path.exists(f"{package}/{name}{suffix}") for suffix in EXTENSION_SUFFIXES)  # noqa: PTH110
    ]
