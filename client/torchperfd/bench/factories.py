"""Finds what ``module:name`` or ``file.py:name`` names."""

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from torchperfd.errors import TorchperfdError


class BadTargetError(TorchperfdError):
    """What was named does not exist, or is of another kind."""

    exit_code = 3


def find_target(target: str) -> Any:
    """Import a module, or a script as a module, and return one of its names.

    A script is not run as ``__main__``: what stands below ``if __name__ == "__main__"`` is left out.

    Raises:
        BadTargetError: There is no such module, file or name.
    """
    place, separator, name = target.rpartition(":")
    if not separator or not place or not name:
        raise BadTargetError(f"{target!r} names nothing", "write module:name or file.py:name")
    module = _import_script(Path(place)) if place.endswith(".py") else _import_module(place)
    found = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise BadTargetError(f"{place} has no {name}")
        found = getattr(found, part)
    return found


def _import_module(name: str) -> Any:
    # As `python -m` does.
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise BadTargetError(
                f"there is no module {name}", "write the path of a script: file.py:name"
            ) from error
        raise


def _import_script(path: Path) -> Any:
    if not path.is_file():
        raise BadTargetError(f"there is no file {path}")
    # Spawned workers import it under this name, from this directory.
    sys.path.insert(0, os.fspath(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    if spec is None or spec.loader is None:
        raise BadTargetError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
