"""Objects that the code on the calling thread can reach by its variables, in place of the collector's list.

``gc.freeze()`` takes all objects of that moment out of the lists that ``gc.get_objects()`` returns.
"""

import gc
import inspect
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType
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
        if issubclass(kind, _NOT_FOLLOWED):
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
