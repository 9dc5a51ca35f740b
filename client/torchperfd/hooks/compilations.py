"""Compilations by torch.compile: how often, and for how long training waited for them."""

import sys
import time
from collections.abc import Callable
from typing import Final

from torchperfd.hooks.context import HookContext
from torchperfd.hooks.frames import keep_classes_out_of_graphs

_CALLBACKS: Final = "torch._dynamo.callback"
# The script may be about to import the module.
_MOST_MISSES: Final = 60


def install(context: HookContext) -> None:
    """Count from now on; follow() does the rest once the script has imported the compiler."""
    keep_classes_out_of_graphs(Compilations)
    context.links.compilations.turn_off = context.turn_off
    context.links.compilations.follow()


class Compilations:
    """Counts compilations of graphs and what they took. Fixed memory, and no cost between them.

    The compiler calls back when it begins and when it has ended. It is never imported here: until the script
    has done so there is nothing to count.

    Attributes:
        calls: Compilations since :meth:`follow` has found the compiler.
        ns: Nanoseconds that they took, whichever thread waited.
        turn_off: Called with the reason where this torch has no such callbacks.
    """

    __slots__ = ("_began", "_begin", "_clock", "_end", "_misses", "_over", "calls", "ns", "turn_off")

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self.calls = self.ns = 0
        self._clock = clock
        self._began = 0
        self._over = False
        self._misses = 0
        self.turn_off: Callable[[str], None] = lambda _: None
        # One object each: a bound method is another one each time it is asked for.
        self._begin, self._end = self._note_begin, self._note_end

    def follow(self) -> None:
        """Begin to count, once the script has imported the compiler; call it again and again.

        ``torch._dynamo.reset`` forgets all callbacks: the next call brings ours back.
        """
        if self._over:
            return
        lists = self._lists()
        for calls, callback in lists:
            if callback not in calls:
                calls.append(callback)
        if len(lists) < 2 and _CALLBACKS in sys.modules:
            self._misses += 1
        if self._misses == _MOST_MISSES:
            self._over = True
            self.turn_off(f"this torch has no start_callbacks and end_callbacks in {_CALLBACKS}")

    def uninstall(self) -> None:
        """Stop counting."""
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
