"""Compilations by torch.compile: how often, and for how long training waited for them."""

import sys
import time
from collections.abc import Callable
from typing import Final

_CALLBACKS: Final = "torch._dynamo.callback"


class Compilations:
    """Counts compilations of graphs and what they took. Fixed memory, and no cost between them.

    The compiler calls back when it begins and when it has ended. It is never imported here: until the script
    has done so there is nothing to count.

    Attributes:
        calls: Compilations since :meth:`follow` has found the compiler.
        ns: Nanoseconds that they took, whichever thread waited.
    """

    __slots__ = ("_began", "_begin", "_clock", "_end", "_over", "calls", "ns")

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self.calls = self.ns = 0
        self._clock = clock
        self._began = 0
        self._over = False
        # One object each: a bound method is another one each time it is asked for.
        self._begin, self._end = self._note_begin, self._note_end

    def follow(self) -> None:
        """Begin to count, once the script has imported the compiler; call it again and again.

        ``torch._dynamo.reset`` forgets all callbacks: the next call brings ours back.
        """
        for calls, callback in () if self._over else self._lists():
            if callback not in calls:
                calls.append(callback)

    def uninstall(self) -> None:
        """Stop counting, for good."""
        self._over = True
        for calls, callback in self._lists():
            if callback in calls:
                calls.remove(callback)

    def _lists(self) -> "list[tuple[list[Callable[..., None]], Callable[..., None]]]":
        handler = getattr(sys.modules.get(_CALLBACKS), "callback_handler", None)
        found = (
            (getattr(handler, "start_callbacks", None), self._begin),
            (getattr(handler, "end_callbacks", None), self._end),
        )
        return [(calls, callback) for calls, callback in found if isinstance(calls, list)]

    def _note_begin(self, *_: object) -> None:
        self._began = self._clock()

    def _note_end(self, *_: object) -> None:
        # Without a beginning it was under way when we came.
        if self._began:
            self.ns += self._clock() - self._began
            self.calls += 1
            self._began = 0
