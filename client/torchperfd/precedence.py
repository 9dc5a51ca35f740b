"""Precedence: the script's own profiler comes before ours.

Torch has one profiler session. A profiler that the script starts while ours is on takes our events and
ends ours under our hands; one that it has prepared (a schedule's warm-up) is torn down by ours, and
the process crashes when the script goes on to start it. So the two functions by which torch's
profilers start are watched: ours is not started in a warm-up, and ends first when the script's comes.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

from torchperfd.interrupts import is_from_script
from torchperfd.logs import log

_PREPARE: Final = "_prepare_profiler"
_ENABLE: Final = "_enable_profiler"


class Precedence:
    """Watches which profilers start.

    Attributes:
        warming_up: The script has prepared a profiler and has not started it yet.
    """

    def __init__(self) -> None:
        self.warming_up = False
        self._give_way: Callable[[], bool] | None = None
        self._starting_thread = 0
        self._pid = 0
        self._wrapped: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}

    def watch(self) -> None:
        """Watch from now on; torch must have been imported."""
        from torch.autograd import profiler

        if self._wrapped:
            return
        for name, wrap in ((_PREPARE, self._wrap_prepare), (_ENABLE, self._wrap_enable)):
            original = getattr(profiler, name)
            self._wrapped[name] = original, wrap(original)
            setattr(profiler, name, self._wrapped[name][1])

    def leave(self) -> None:
        """Watch no longer."""
        self.warming_up = False
        while self._wrapped:
            from torch.autograd import profiler

            name, (original, wrapper) = self._wrapped.popitem()
            # Somebody else may have wrapped it meanwhile; what is left of ours then does nothing.
            if getattr(profiler, name) is wrapper:
                setattr(profiler, name, original)

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """What this thread starts within is ours."""
        self._starting_thread = threading.get_ident()
        try:
            yield
        finally:
            self._starting_thread = 0

    def begin(self, give_way: Callable[[], bool]) -> None:
        """Ours is on.

        Args:
            give_way: Called before the script's profiler starts, on the thread that starts it; ends
                ours and returns whether it did.
        """
        self._pid = os.getpid()
        self._give_way = give_way

    def end(self) -> None:
        """Ours is off."""
        self._give_way = None

    def _end_ours(self) -> bool:
        give_way = self._give_way
        # In a forked child ours is off already, and the thread that would end it is not there.
        if give_way is None or self._pid != os.getpid():
            return False
        try:
            return give_way()
        except Exception as error:  # the script's profiler must start whatever becomes of ours
            if is_from_script(error):
                raise
            log.exception("a capture did not end when the script started its own profiler")
            return False

    def _wrap_prepare(self, prepare: Callable[..., Any]) -> Callable[..., Any]:
        def prepare_after_ours(*arguments: Any, **options: Any) -> Any:
            if self._starting_thread != threading.get_ident():
                self._end_ours()
                # Noted for as long as we watch only: nobody else would take it back.
                self.warming_up = bool(self._wrapped)
            return prepare(*arguments, **options)

        return prepare_after_ours

    def _wrap_enable(self, enable: Callable[..., Any]) -> Callable[..., Any]:
        prepare, _ = self._wrapped[_PREPARE]

        def enable_after_ours(*arguments: Any, **options: Any) -> Any:
            if self._starting_thread == threading.get_ident():
                return enable(*arguments, **options)
            self.warming_up = False
            if not self._end_ours():
                return enable(*arguments, **options)
            # It was prepared before we watched, and ours has undone that; torch's flag, too.
            with self.starting():
                prepare(*arguments[:2])
            result = enable(*arguments, **options)
            from torch.autograd import profiler

            profiler._run_on_profiler_start()  # type: ignore[no-untyped-call]
            return result

        return enable_after_ours


PRECEDENCE: Final = Precedence()
"""The process has one profiler session, and so one of these."""
