"""All objects of the interpreter: those that the collector lists, and those hidden by ``gc.freeze()``.

``gc.freeze()`` removes all current objects from the lists that ``gc.get_objects()`` returns. They are found
through the variables of the calling thread instead.
"""

import gc
import inspect
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from queue import SimpleQueue
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType, TracebackType
from typing import Any, Final

from torch import Tensor

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
        """Return the objects."""
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
