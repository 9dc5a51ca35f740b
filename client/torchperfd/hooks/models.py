"""Forward passes of the root models: found by what the optimizers own, timed once each."""

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
from torchperfd.tape import Forward
from torchperfd.tape import events as on_tape

_MAX_SEARCHES_AT_DRAW = 2
_MAX_SEARCHES_AT_STEP = 32
_MAX_LOOKS_AT_DRAW = 4

# What torch calls instead of a module's own call, where it has been compiled in place; ours calls
# what was there. Unlike hooks it is left out where a module is pickled or copied, costs a module
# without hooks no detour, and is not traced into graphs.
_PLACE = "_compiled_call_impl"


class RootModels:
    """Knows the models whose ``forward`` is the loop's forward.

    A root is a module that no other module contains and whose parameters an optimizer
    updates. Only roots are timed: doing so with every submodule would cost a fraction of a
    microsecond per call.

    Attributes:
        optimizers: Those whose models have been looked for, by id.
    """

    def __init__(self, context: HookContext, patches: Patches) -> None:
        self.optimizers: dict[int, weakref.ref[Optimizer]] = {}
        self._context = context
        self._patches = patches
        self._timed: dict[int, weakref.ref[nn.Module]] = {}
        self._draws = 0
        self._looks = 0
        self._steps = 0

    def install(self) -> None:
        """Hear of models that are compiled in place, and of those that are replicated."""
        compile_in_place = vars(nn.Module)["compile"]

        @functools.wraps(compile_in_place)
        def compile(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            compile_in_place(module, *args, **kwargs)
            try:
                known = self._timed.get(id(module))
                if self._context.active and known is not None and known() is module:
                    self._time(module)
            except BaseException as error:
                if not self._context.absorb("compile", error):
                    raise

        self._patches.replace(nn.Module, "compile", keep_out_of_graphs(compile))
        # DataParallel's replicas share their original's attributes; what we put there calls the original.
        replicate = vars(nn.Module)["_replicate_for_data_parallel"]

        @functools.wraps(replicate)
        def replicated(module: nn.Module) -> nn.Module:
            replica: nn.Module = replicate(module)
            if isinstance(vars(replica).get(_PLACE), Forward):
                del vars(replica)[_PLACE]
            return replica

        self._patches.replace(nn.Module, "_replicate_for_data_parallel", keep_out_of_graphs(replicated))

    def add(self, model: nn.Module) -> None:
        """Time the forward of ``model``; twice is once."""
        if _is_new(model, self._timed):
            self._time(model)

    def before_draw(self) -> bool:
        """Look for roots before the first batches: early enough to see the first forward.

        Returns:
            Whether to be called ahead of the next draw, too.
        """
        if self._draws >= _MAX_SEARCHES_AT_DRAW:
            return False
        self._looks += 1
        # torch.compile may have wrapped a model after it was named: then the wrapper is the root.
        if not self._timed or (not self._draws and "torch._dynamo" in sys.modules):
            self._draws += 1
            self._search()
        return self._looks < _MAX_LOOKS_AT_DRAW and self._draws < _MAX_SEARCHES_AT_DRAW

    def before_step(self, optimizer: Optimizer) -> None:
        """Look for roots when an optimizer steps for the first time, unless its model is known.

        A script may train one model after another; each brings its own optimizer.
        """
        if self._steps >= _MAX_SEARCHES_AT_STEP or not _is_new(optimizer, self.optimizers):
            return
        self._steps += 1
        self._search()

    def _search(self) -> None:
        # A scan of all objects: 70 to 250 ms with torch loaded, hence the limits above.
        optimizers, modules = _optimizers_and_modules()
        for optimizer in optimizers:
            _is_new(optimizer, self.optimizers)
        for root in roots(modules, optimizers):
            self.add(root)

    def _time(self, model: nn.Module) -> None:
        forward = Forward(
            self._context.tape,
            model,
            vars(model).get(_PLACE),
            torch.is_grad_enabled,
            on_tape.FORWARD,
            on_tape.EVALUATE,
            on_tape.FORWARD_END,
        )
        self._patches.replace_own(model, _PLACE, forward)


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
