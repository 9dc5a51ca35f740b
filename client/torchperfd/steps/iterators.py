"""Iterators over batches: which of them are gone by the time that another loop begins.

A loop that is left early, by ``break`` or by an exception, does not exhaust its loader. Python drops the
iterator then; what happens between that and the next loop is no step's.
"""

import sys
import weakref
from typing import Any, Final

from torchperfd.events import EventBuffer, codes

_MAX_KNOWN: Final = 8


class Iterators:
    """Knows the iterators that the followed thread draws from.

    Nothing is called when an iterator is dropped: an exception that a signal handler raises there would be
    lost. They are looked through when a loop begins.

    Args:
        buffer: Where to write.
    """

    def __init__(self, buffer: EventBuffer) -> None:
        self._buffer = buffer
        self._known: dict[int, weakref.ref[Any]] = {}

    def begin(self, iterator: Any) -> None:
        """A loop is about to draw from an iterator, which may be one that was drawn from before."""
        buffer, known = self._buffer, self._known
        if not buffer.here():
            return
        own = id(iterator)
        for key, reference in list(known.items()):
            alive = reference()
            if alive is None or alive is iterator:
                del known[key]
                buffer.mark(codes.LEFT, key)
            elif _has_name(alive):
                buffer.mark(codes.LEFT, key | codes.LEFT_NAMED)
        buffer.mark(codes.PASS)
        try:
            known[own] = weakref.ref(iterator)
        except TypeError:
            return  # a list's, for example: when it is dropped stays unknown
        if len(known) > _MAX_KNOWN:
            del known[next(iter(known))]


def _has_name(iterator: Any) -> bool:
    """Return whether a module on the call stack holds it by a name, as no ``for`` loop does.

    The local variables of functions are not asked for: up to Python 3.12 that keeps them alive.
    """
    frame, seen = sys._getframe(1), set()
    while frame is not None:
        names = frame.f_globals
        if id(names) not in seen:
            seen.add(id(names))
            if any(value is iterator for value in list(names.values())):
                return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
