"""The root models: found by the parameters that optimizers own, or returned by ``torch.load``.

Their search goes through all objects of the interpreter: those that the collector lists, and those hidden by
``gc.freeze()``.
"""

import functools
import gc
import inspect
import sys
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from queue import SimpleQueue
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType, TracebackType
from typing import Any, Final

import torch
import torch.serialization
from torch import Tensor, nn
from torch.optim import Optimizer

from torchperfd.events import codes
from torchperfd.hooks.context import HookContext, Models, own_attribute
from torchperfd.hooks.patches import keep_classes_out_of_graphs, keep_out_of_graphs
from torchperfd.safety.logs import log

_MAX_OBJECTS: Final = 200_000
"""Reading so many takes some tenths of a second."""
_MAX_PARTS: Final = 10_000
"""A longer container holds data, and no models."""
# These lead to all of torch.
_NOT_FOLLOWED: Final = (ModuleType, type, CodeType, FrameType, BuiltinFunctionType, Tensor)
_OWN: Final = "torchperfd."
_SIZED: Final = (dict, list, tuple, set, frozenset, deque)


def reachable_objects() -> list[Any]:
    """Return what the variables of the calling functions and of their modules lead to, the nearest first."""
    found: list[Any] = []
    seen: set[int] = set()
    due: deque[Any] = deque()

    def add(objects: Iterable[Any]) -> None:
        for each in objects:
            # What the collector does not track refers to nothing.
            if gc.is_tracked(each) and id(each) not in seen:
                seen.add(id(each))
                due.append(each)

    for variables in _variables(sys._getframe()):
        add(variables)
    while due and len(found) < _MAX_OBJECTS:
        each = due.popleft()
        kind = type(each)
        # What a caller holds of us leads to the list that these objects join: it would contain itself.
        if issubclass(kind, (*_NOT_FOLLOWED, LiveObjects)):
            continue
        found.append(each)
        if issubclass(kind, FunctionType):
            # Not its module's variables: those of the modules of callers are there already.
            add(gc.get_referents(*(each.__closure__ or ())))
        elif kind not in _SIZED or len(each) <= _MAX_PARTS:
            add(gc.get_referents(each))
    return found


def _variables(frame: FrameType | None) -> Iterator[list[Any]]:
    modules: set[int] = set()
    while frame is not None:
        # Our own lead to the list of what is found.
        if not str(frame.f_globals.get("__name__")).startswith(_OWN):
            if id(frame.f_globals) not in modules:
                modules.add(id(frame.f_globals))
                yield [*frame.f_globals.values()]
            if frame.f_code.co_flags & inspect.CO_OPTIMIZED:
                variables = frame.f_locals
                yield [*variables.values()]
                # Before Python 3.13 it is a copy, which the frame keeps, and with it the script's tensors.
                if type(variables) is dict:
                    variables.clear()
        frame = frame.f_back


_CHUNK: Final = 5_000
_PAUSE_S: Final = 0.02


class LiveObjects:
    """The objects that the garbage collector lists, to be read within a ``with`` block.

    Where the script has called ``gc.freeze()``, they are joined by what the calling thread can reach.

    Freeing the list takes tens of milliseconds, as it touches every object. If a signal handler of the script
    raises within the block, that comes before its ``except`` clause, and the handler of a repeating timer may
    raise again meanwhile, in place of the first. So another thread frees the list then, bit by bit.

    Args:
        generation: Only of this one; None for all.
    """

    def __init__(self, generation: int | None) -> None:
        self._generation = generation
        self._lists: list[list[Any]] = []
        self._over: SimpleQueue[list[list[Any]]] = SimpleQueue()

    def read(self) -> list[Any]:
        # Within one built-in call: what a handler raises between two instructions must not find it unowned.
        self._lists.extend(map(gc.get_objects, (self._generation,)))
        if self._generation is None and gc.get_freeze_count():
            self._lists[-1].extend(reachable_objects())
        return self._lists[-1]

    def __enter__(self) -> "LiveObjects":
        # Ahead of its use: to start a thread takes too long for the way to an ``except`` clause.
        threading.Thread(target=_free, args=(self._over,), name="torchperfd-free", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            # Among the objects are these lists themselves.
            self._lists.clear()
        self._over.put(self._lists)


def _free(over: "SimpleQueue[list[list[Any]]]") -> None:
    for objects in over.get():
        while objects:
            del objects[-_CHUNK:]
            time.sleep(_PAUSE_S)


_MAX_SEARCHES_AT_DRAW = 2
# All searches at optimizers' first steps together may take so long, and that part of the time since.
_SEARCH_SECONDS = 2.0
_SEARCH_SHARE = 0.02
_SEARCH_PAUSE_SECONDS = 1.0
_MAX_MODELS = 8
_MAX_OPTIMIZERS = 64
_YOUNG = (0, 1)
_MAX_LOOKS_AT_DRAW = 4


def install_models(context: HookContext) -> None:
    """Find models ahead of the first draws, outside of any step's time."""
    keep_classes_out_of_graphs(RootModels)
    models = RootModels(context)
    context.links.models = models
    context.links.before_draw.append(context.guard(models.before_draw, False))


class RootModels(Models):
    """Knows the models whose ``forward`` is the loop's forward.

    A root is a module that no other module contains and whose parameters an optimizer
    updates. Only roots are timed: doing so with every submodule would cost a fraction of a
    microsecond per call.
    """

    def __init__(self, context: HookContext) -> None:
        super().__init__()
        self._context = context
        self._timed: dict[int, weakref.ref[nn.Module]] = {}
        self._updated: dict[int, weakref.ref[nn.Module]] = {}
        self._draws = 0
        self._looks = 0
        self._began = time.monotonic()
        self._searched_seconds = 0.0
        self._searched_at = -_SEARCH_PAUSE_SECONDS
        self._found_early = False
        self._given_up = False
        self._kinds: set[tuple[type, int]] = set()
        self._look_guarded = context.guard(self._look_for_model, None)
        self._note_guarded = context.guard(self._note_updates, None)

    def is_known(self, model: nn.Module) -> bool:
        """Return whether the model is one of those that were found or named."""
        return _is_among(model, self._timed)

    def see(self, model: nn.Module) -> None:
        """Take note of a model that zeroes its gradients: no more may show where no optimizer is torch's."""
        if not self.alive and not self._timed:
            self.alive.append(weakref.ref(model))
            self._note_updates(())

    def add(self, model: nn.Module) -> None:
        """Time the forward of ``model``; twice is once."""
        if _is_new(model, self._timed):
            self._time(model)

    def before_draw(self, _iterator: object = None) -> bool:
        """Look for roots before the first batches: early enough to see the first forward.

        Returns:
            Whether to be called ahead of the next draw, too.
        """
        if self._draws >= _MAX_SEARCHES_AT_DRAW:
            return False
        self._looks += 1
        # A model may have been wrapped after it was named or found: then the wrapper is the root.
        wrapped = "torch._dynamo" in sys.modules or self._found_early
        if not self._timed or (not self._draws and wrapped):
            self._draws += 1
            self._search()
        return self._looks < _MAX_LOOKS_AT_DRAW and self._draws < _MAX_SEARCHES_AT_DRAW

    def before_step(self, optimizer: Optimizer) -> None:
        """Look for roots when an optimizer steps for the first time, unless its model is known.

        A script may train one model after another; each brings its own optimizer.
        """
        if not _is_new(optimizer, self.stepped):
            return
        if _is_new(optimizer, self.optimizers):
            self.look_for_model(optimizer)
        self._note_guarded([optimizer])

    def look_for_model(self, optimizer: Optimizer) -> None:
        """Look for the model of an optimizer, unless searches have taken too long already."""
        self._look_guarded(optimizer)

    def _look_for_model(self, optimizer: Optimizer) -> None:
        self._found_early = self._found_early or not self._timed
        if self._may_search():
            self._search(optimizer)

    def _may_search(self) -> bool:
        allowed = _SEARCH_SECONDS + _SEARCH_SHARE * (time.monotonic() - self._began)
        if self._searched_seconds < allowed:
            return True
        if not self._given_up:
            self._given_up = True
            log.info(
                "searching for the models of %d optimizers took %.1f s, so those of further ones are not "
                "searched for and their forward is not timed; name a model with torchperfd.attach(model=...)",
                *(len(self.optimizers), self._searched_seconds),
            )
        return False

    def _search(self, optimizer: Optimizer | None = None) -> None:
        """Read Python's objects: all, or for one optimizer the youngest first, where a new model is."""
        began = time.monotonic()
        # torch.compile may have wrapped a model that is known: then the wrapper is the root, and it is young.
        known = optimizer is not None and bool(roots(self.living(), [optimizer]))
        if known and began - self._searched_at < _SEARCH_PAUSE_SECONDS:
            return  # one of many optimizers, one for each parameter
        self._searched_at = began
        inside = [module for model in self.living() for module in model.modules()] if optimizer else []
        generations = (None,) if optimizer is None else _YOUNG if known else (*_YOUNG, None)
        for generation in generations:
            # A scan of all objects takes 70 to 250 ms with torch loaded, hence the limits above.
            optimizers, modules = live_optimizers_and_modules(generation)
            if optimizer is not None:
                # Among the young, those of others may be parts whose whole is older.
                optimizers = [optimizer] if generation is not None else [*optimizers, optimizer]
            found = roots({id(module): module for module in (*modules, *inside)}.values(), optimizers)
            known_parts = {id(module) for module in inside}
            new = [root for root in found if id(root) not in known_parts]
            # A copy of a model that was a root is one, as in federated learning or cross validation.
            unknown = [root for root in new if _kind_of(root) not in self._kinds]
            if generation is not None and _may_have_parents(unknown):
                continue
            self._kinds.update(map(_kind_of, new[:_MAX_MODELS]))
            for each in optimizers:
                _is_new(each, self.optimizers)
            for root in found:
                self.add(root)
            if optimizer is not None and not known and roots(found, [optimizer]):
                break
        seconds = time.monotonic() - began
        self._searched_seconds += seconds
        self._context.buffer.mark(codes.NOT_TRAINING, int(seconds * 1e9))

    def is_on_its_own(self, optimizer: Optimizer) -> bool:
        """Return whether it shares no parameters with another, as an optimizer around one does."""
        if len(self.optimizers) > _MAX_OPTIMIZERS:
            return False
        own = _parameters_of(optimizer)
        others = (reference() for reference in self.optimizers.values())
        return all(
            own.isdisjoint(_parameters_of(other)) for other in others if other not in (None, optimizer)
        )

    def _time(self, model: nn.Module) -> None:
        if len(self.alive) >= _MAX_MODELS:
            # A script that makes a model for every client or fold.
            self.alive[:] = [reference for reference in self.alive if reference() is not None][-_MAX_MODELS:]
        if not any(model is known for known in self.living()):
            self.alive.append(weakref.ref(model))
        self._note_updates([one for reference in self.stepped.values() if (one := reference()) is not None])
        if self._context.links.time_forward is not None:
            self._context.links.time_forward(model)

    def _note_updates(self, optimizers: Iterable[Optimizer]) -> None:
        """Renew the list of trained models after optimizers have stepped, or a model was found.

        A model that is left over from earlier work, in training mode, says nothing about the loop.
        """
        for model in self.living():
            if not _is_among(model, self._updated) and roots([model], optimizers):
                self._updated[id(model)] = weakref.ref(model)
        trained = [reference for reference in self.alive if _is_among(reference(), self._updated)]
        self.trained[:] = trained or self.alive


def _is_new(thing: Any, known: dict[int, "weakref.ref[Any]"]) -> bool:
    """Add a thing to those that are known; return whether it was not among them."""
    if _is_among(thing, known):
        return False
    known[id(thing)] = weakref.ref(thing)
    return True


def _is_among(thing: Any, known: dict[int, "weakref.ref[Any]"]) -> bool:
    # An id alone is not enough: the model of the next fold may live where the last one did.
    reference = known.get(id(thing))
    return thing is not None and reference is not None and reference() is thing


def roots(modules: Iterable[nn.Module], optimizers: Iterable[Optimizer]) -> list[nn.Module]:
    """Return the modules without a parent that hold a parameter of one of the optimizers."""
    owned: set[int] = set().union(*(_parameters_of(optimizer) for optimizer in optimizers))
    modules = list(modules)
    contained = {id(child) for module in modules for child in module.children()}
    return [
        module
        for module in modules
        if id(module) not in contained and any(id(parameter) in owned for parameter in module.parameters())
    ]


def _kind_of(model: nn.Module) -> tuple[type, int]:
    return type(model), sum(1 for _ in model.parameters())


def _may_have_parents(modules: list[nn.Module]) -> bool:
    """Return whether one of the modules is in a dict of modules, as in its parent's.

    A parent is made ahead of its children, so that it may be among the older objects while they are not.
    """
    if not modules:
        return False
    return any(
        # Of an older torch it is an ordered one.
        type(holder) in (dict, OrderedDict)
        and all(issubclass(type(part), nn.Module | None) for part in holder.values())
        for holder in gc.get_referrers(*modules)
    )


def _parameters_of(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def live_optimizers_and_modules(generation: int | None) -> tuple[list[Optimizer], list[nn.Module]]:
    """Return the optimizers and modules among live objects, of one generation of the collector or of all."""
    # By type, not isinstance: that asks the object, and a dead weak proxy raises.
    wanted: dict[type, int] = {}
    found: tuple[list[Any], list[Any]] = ([], [])
    with LiveObjects(generation) as live:
        for candidate in live.read():
            kind = type(candidate)
            which = wanted.get(kind)
            if which is None:
                which = 0 if issubclass(kind, Optimizer) else 1 if issubclass(kind, nn.Module) else 2
                wanted[kind] = which
            if which < 2:
                found[which].append(candidate)
    return found


def install_loaded_models(context: HookContext) -> None:
    """Time the forward of a loaded model if one of its class is timed."""
    load = own_attribute(torch.serialization, "load")

    @functools.wraps(load)
    def loaded(*args: Any, **kwargs: Any) -> Any:
        thing = load(*args, **kwargs)
        try:
            models = context.links.models
            known = context.active and isinstance(thing, nn.Module)
            if known and any(type(model) is type(thing) for model in models.living()):
                models.add(thing)
        except BaseException as error:
            if not context.absorb(error, costs_step=False):
                raise
        return thing

    keep_out_of_graphs(loaded)
    for owner in (torch, torch.serialization):
        if vars(owner).get("load") is load:
            context.patches.replace(owner, "load", loaded)
