"""Wait for the script to import torch, without importing it ourselves."""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def when_torch_is_imported(action: Callable[[], None]) -> "TorchImport | None":
    """Run ``action`` now if torch is there, else right after its import.

    Returns:
        The pending wait, to be cancelled; None when ``action`` has run.
    """
    if "torch" in sys.modules:
        action()
        return None
    pending = TorchImport(action)
    sys.meta_path.insert(0, pending)
    return pending


class TorchImport(MetaPathFinder):
    """Stands first among the finders until torch is asked for, then steps aside."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action

    def cancel(self) -> None:
        """Stop waiting."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find torch as everybody else would, with a loader that tells us when it is done."""
        if fullname != "torch":
            return None
        self.cancel()
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.loader is not None:
            spec.loader = _TellingLoader(spec.loader, self._action)
        return spec


class _TellingLoader(Loader):
    def __init__(self, loader: Loader, action: Callable[[], None]) -> None:
        self._loader = loader
        self._action = action

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # From here on the module looks as if we had never been there.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._action()
