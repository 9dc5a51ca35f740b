"""Patching torch: wait for the script to import it, and replace attributes so that they can be restored.

Replacements are kept out of compiled graphs where dynamo would compile them.
"""

import sys
import weakref
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, Final, TypeVar

from torchperfd.safety.interrupts import is_from_script
from torchperfd.safety.logs import log

F = TypeVar("F", bound=Callable[..., Any])

step_code: set[CodeType] = set()
"""Code that runs while an optimizer steps; the hooks of optimizers and of gradient scalers add to it."""


def inside_step(frame: FrameType | None) -> bool:
    """Return whether an optimizer step is at work in this frame or further up the stack."""
    while frame is not None:
        if frame.f_code in step_code:
            return True
        frame = frame.f_back
    return False


def skip_code(code: CodeType) -> None:
    """Have dynamo run this code without compiling it.

    Raises:
        AttributeError: This torch has no such setting.
    """
    import torch

    dynamo = torch._C._dynamo.eval_frame
    if hasattr(dynamo, "skip_code"):  # before torch 2.7
        dynamo.skip_code(code)
        return
    action = dynamo._FrameAction
    strategy = dynamo._FrameExecStrategy(action.SKIP, action.DEFAULT)
    dynamo.set_code_exec_strategy(code, strategy)


def keep_classes_out_of_graphs(*classes: type) -> None:
    """The same for all methods that hooks call: dynamo would compile one trivial frame for each."""
    for owner in classes:
        for method in vars(owner).values():
            if isinstance(method, FunctionType):
                keep_out_of_graphs(method, inline=True)


def keep_functions_out_of_graphs(module: ModuleType) -> None:
    """The same for all functions of a module of ours."""
    for function in vars(module).values():
        if isinstance(function, FunctionType):
            keep_out_of_graphs(function, inline=True)


def keep_out_of_graphs(function: F, *, inline: bool = False) -> F:
    """Have dynamo run a hook without compiling it where compiled code calls it.

    Otherwise dynamo compiles the hook's frame as well: an extra graph, in which the hook takes
    itself for compiled and stays silent. Where torch has no such setting, nothing happens; the hook
    ``compiler`` is off then.

    Args:
        function: The hook; returned.
        inline: Let it be traced through where the caller's own frame is compiled. Only what
            breaks the graph without us may go without: we must not add a break.
    """
    try:
        skip_code(function.__code__)
    except Exception as error:
        if is_from_script(error):
            raise
        log.debug("this torch cannot keep %s out of compiled graphs", function)
    if not inline:
        function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


def when_imported(module: str, action: Callable[[], None]) -> "ModuleImport | None":
    """Run ``action`` now if a module is there, else right after its import.

    Returns:
        The pending wait, to be cancelled; None when ``action`` has run.
    """
    if module in sys.modules:
        action()
        return None
    pending = ModuleImport(module, action)
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
        sys.meta_path.insert(0, self)

    def cancel(self) -> None:
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


_ABSENT: Final = object()


class Patches:
    """Attributes we replaced, newest last."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def replace(self, owner: Any, name: str, replacement: Any) -> None:
        """Set ``owner.name`` of a class or module, remembering what was there.

        Raises:
            AttributeError: ``owner`` itself has no such attribute (an inherited one does not count).
        """
        if name not in vars(owner):
            raise AttributeError(f"{owner!r} has no attribute {name!r} of its own")
        original = vars(owner)[name]
        setattr(owner, name, replacement)

        def undo() -> None:
            # A later patch of other code is left alone: taking their patch away would break
            # them, and ours passes through once it is silenced.
            if vars(owner).get(name) is replacement:
                setattr(owner, name, original)

        self._undo.append(undo)

    def add(self, owner: type, name: str, value: Any) -> None:
        """Set an attribute of a class that has none of its own; undoing takes it away again."""
        setattr(owner, name, value)

        def undo() -> None:
            if vars(owner).get(name) is value:
                delattr(owner, name)

        self._undo.append(undo)

    def replace_own(self, instance: Any, name: str, replacement: Any) -> None:
        """Set an attribute in the instance's own dict, where there may be none so far.

        The instance is not kept alive, and none of its ``__setattr__`` is asked.
        """
        original = vars(instance).get(name, _ABSENT)
        vars(instance)[name] = replacement
        reference = weakref.ref(instance)

        def undo() -> None:
            alive = reference()
            if alive is None or vars(alive).get(name) is not replacement:
                return
            if original is _ABSENT:
                del vars(alive)[name]
            else:
                vars(alive)[name] = original

        self._undo.append(undo)

    def undo(self) -> None:
        """Put every original back, newest first."""
        while self._undo:
            self._undo.pop()()
