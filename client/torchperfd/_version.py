"""The version and the commit of the whole distribution, and what of it is compiled."""

import os.path
from importlib.machinery import EXTENSION_SUFFIXES
from typing import Final

try:
    from torchperfd._build import REVISION, VERSION
except ImportError:  # a checkout that has not been installed
    VERSION, REVISION = "0.1.dev0", ""

__version__: Final[str] = VERSION
"""From the commit's tag; between two tags it has the number of commits since, and the commit."""

__revision__: Final[str] = REVISION
"""Commit that the distribution was built from, 12 hexadecimal digits; empty if the build had none."""

NATIVE_MODULES: Final = ("events/_native", "steps/_templates")
"""Compiled when the package is built, if there is a compiler; paths in this package, without their ending."""

NATIVE_ABI: Final = "torchperfd-native-abi-4"
"""What those modules must have as ``ABI``; ``events/native/abi.h`` has the same."""


def missing_native_modules(package: str = os.path.dirname(__file__)) -> list[str]:  # noqa: PTH120 - import time
    """Return the native modules that this installation lacks; Python does their work, at ten times the cost.

    A module that another version has left, as in a checkout that was updated, counts as missing.

    Args:
        package: The directory of the client's package.
    """
    return [
        name
        for name in NATIVE_MODULES
        if not any(_is_built(f"{package}/{name}{suffix}") for suffix in EXTENSION_SUFFIXES)
    ]


def _is_built(path: str) -> bool:
    try:
        with open(path, "rb") as module:  # noqa: PTH123 - import time
            return NATIVE_ABI.encode() + b"\0" in module.read()
    except OSError:
        return False
