"""Forward passes of the root models: found by what the optimizers own, hooked once each."""

import functools
import gc
import sys
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchperfd.hooks.context import HookContext
from torchperfd.hooks.frames import keep_out_of_graphs
from torchperfd.hooks.patches import Patches

_MAX_SEARCHES_AT_DRAW = 2
_MAX_SEARCHES_AT_STEP = 32


class RootModels:
    """Knows the models whose ``forward`` is the loop's forward.

    A root is a module that no other module contains and whose parameters an optimizer
    updates. Only roots are hooked: a hook on every submodule would cost more than a
    microsecond per call.
    """

    def __init__(self, context: HookContext, patches: Patches) -> None:
        self._context = context
        self._patches = patches
        self._handles: dict[int, tuple[Any, ...]] = {}
        self._hooked: dict[int, weakref.ref[nn.Module]] = {}
        self._optimizers: dict[int, weakref.ref[Optimizer]] = {}
        self._draws = 0
        self._steps = 0

    def install(self) -> None:
        """Hear of models that are compiled in place after they were hooked."""
        original = vars(nn.Module)["compile"]

        @functools.wraps(original)
        def compile(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            original(module, *args, **kwargs)
            try:
                self._compiled(module)
            except Exception as error:  # noqa: BLE001 - nothing of ours may reach training
                self._context.fault("compile", error)

        self._patches.replace(nn.Module, "compile", keep_out_of_graphs(compile))

    def add(self, model: nn.Module) -> None:
        """Time the forward of ``model``; twice is once."""
        if not _is_new(model, self._hooked):
            return
        if getattr(model, "_compiled_call_impl", None) is not None:
            self._wrap_compiled(model)
            return
        # always_call: a forward that raises must still leave its phase.
        self._handles[id(model)] = (
            model.register_forward_pre_hook(self._before, prepend=True),
            model.register_forward_hook(self._after, always_call=True),
        )

    def before_draw(self) -> None:
        """Look for roots before the first batches: early enough to see the first forward."""
        if self._draws >= _MAX_SEARCHES_AT_DRAW:
            return
        # torch.compile may have wrapped a model after it was named: then the wrapper is the root.
        if self._hooked and (self._draws or "torch._dynamo" not in sys.modules):
            return
        self._draws += 1
        self._search()

    def before_step(self, optimizer: Optimizer) -> None:
        """Look for roots when an optimizer steps for the first time, unless its model is known.

        A script may train one model after another; each brings its own optimizer.
        """
        if self._steps >= _MAX_SEARCHES_AT_STEP or not _is_new(optimizer, self._optimizers):
            return
        self._steps += 1
        self._search()

    def _search(self) -> None:
        # A scan of all objects: 70 to 250 ms with torch loaded, hence the limits above.
        optimizers, modules = _optimizers_and_modules()
        for optimizer in optimizers:
            _is_new(optimizer, self._optimizers)
        for root in roots(modules, optimizers):
            self.add(root)

    def remove(self) -> None:
        """Take every hook off."""
        for handles in self._handles.values():
            for handle in handles:
                handle.remove()
        self._handles.clear()
        self._hooked.clear()

    def _compiled(self, module: nn.Module) -> None:
        known = self._hooked.get(id(module))
        if not self._context.active or known is None or known() is not module:
            return
        # Hooks would be compiled into the graph, and be silent there.
        for handle in self._handles.pop(id(module), ()):
            handle.remove()
        self._wrap_compiled(module)

    def _before(self, module: nn.Module, _args: Any) -> None:
        if torch.compiler.is_compiling() or not self._context.here():
            return
        try:
            self._context.loop.forward_begin(module.training and torch.is_grad_enabled())
        except Exception as error:  # noqa: BLE001 - nothing of ours may reach training
            self._context.fault("forward", error)

    def _after(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        if torch.compiler.is_compiling() or not self._context.here():
            return
        try:
            self._context.loop.forward_end()
        except Exception as error:  # noqa: BLE001
            self._context.fault("forward", error)

    def _wrap_compiled(self, model: nn.Module) -> None:
        """``model.compile()`` compiles hooks into the graph; time around it instead."""
        compiled = model._compiled_call_impl

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._before(model, args)
            try:
                return compiled(*args, **kwargs)  # type: ignore[misc]
            finally:
                self._after(model, args, None)

        self._patches.replace(model, "_compiled_call_impl", timed)


def _is_new(thing: Any, known: dict[int, "weakref.ref[Any]"]) -> bool:
    """Add a thing to those that are known; return whether it was not among them.

    An id alone does not tell: the model of the next fold may live where the last one did.
    """
    seen = known.get(id(thing))
    if seen is not None and seen() is thing:
        return False
    known[id(thing)] = weakref.ref(thing)
    return True


def roots(modules: Iterable[nn.Module], optimizers: Iterable[Optimizer]) -> list[nn.Module]:
    """Return the modules without a parent that hold a parameter of one of the optimizers."""
    owned = {
        id(parameter)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    modules = list(modules)
    contained = {id(child) for module in modules for child in module._modules.values()}
    return [
        module
        for module in modules
        if id(module) not in contained and any(id(parameter) in owned for parameter in module.parameters())
    ]


def _optimizers_and_modules() -> tuple[list[Optimizer], list[nn.Module]]:
    # By type, not isinstance: that asks the object, and a dead weak proxy raises.
    wanted: dict[type, int] = {}
    found: tuple[list[Any], list[Any]] = ([], [])
    for candidate in gc.get_objects():
        kind = type(candidate)
        which = wanted.get(kind)
        if which is None:
            which = 0 if issubclass(kind, Optimizer) else 1 if issubclass(kind, nn.Module) else 2
            wanted[kind] = which
        if which < 2:
            found[which].append(candidate)
    return found
