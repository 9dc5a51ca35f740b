"""Wait for the script to import a module, torch above all, without importing it ourselves."""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def when_torch_is_imported(action: Callable[[], None]) -> "ModuleImport | None":
    """Run ``action`` now if torch is there, else right after its import.

    Returns:
        The pending wait, to be cancelled; None when ``action`` has run.
    """
    if "torch" in sys.modules:
        action()
        return None
    pending = ModuleImport("torch", action)
    pending.wait()
    return pending


class ModuleImport(MetaPathFinder):
    """Stands first among the finders until a module has been imported, then steps aside.

    Args:
        name: The module's full name.
        action: Called right after its import.
    """

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self._name = name
        self._action: Callable[[], None] | None = action
        self._interrupted: ModuleType | None = None
        self._is_searching = False

    def wait(self) -> None:
        """Begin to wait."""
        sys.meta_path.insert(0, self)

    def cancel(self) -> None:
        """Stop waiting."""
        self._action = None
        if self._interrupted is None:
            self._step_aside()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the module as every other finder would, with a loader that calls back when it is done.

        A caller may only want to know whether there is such a module: keep waiting for its import.
        """
        # Another that waits for the same module asks this one, which is asking it.
        if fullname != self._name or self._is_searching:
            return None
        if self._interrupted is not None:
            return ModuleSpec(fullname, _ModuleAgain(self._interrupted, self._imported))
        self._is_searching = True
        try:
            return self._find_elsewhere(fullname, path, target)
        finally:
            self._is_searching = False

    def _find_elsewhere(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        for finder in list(sys.meta_path):
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(fullname, path, target) if find is not None else None
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _TellingLoader(spec.loader, self._imported)
                return spec
        return None

    def _step_aside(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def _imported(self, module: ModuleType) -> None:
        if self not in sys.meta_path:
            return
        action, self._action, self._interrupted = self._action, None, None
        self._step_aside()
        try:
            if action is not None:
                action()
        except BaseException:
            # A signal handler of the script has raised. The import fails by that, so that Python forgets the
            # module. It is imported already, and torch cannot be a second time.
            self._action, self._interrupted = action, module
            sys.meta_path.insert(0, self)
            raise


class _ModuleAgain(Loader):
    """Imports a module that has been imported before."""

    def __init__(self, module: ModuleType, on_loaded: Callable[[ModuleType], None]) -> None:
        self._module = module
        self._spec = module.__spec__
        self._on_loaded = on_loaded

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec
        self._on_loaded(module)


class _TellingLoader(Loader):
    def __init__(self, loader: Loader, on_loaded: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._on_loaded = on_loaded

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # From here on the module looks as if we had never been there.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._on_loaded(module)
