"""All objects of the interpreter, in a list that is quickly let go of when the script raises meanwhile."""

import gc
import threading
import time
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Final

from torchperfd.hooks.reachable_objects import reachable_objects

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
