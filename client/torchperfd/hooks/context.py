"""What every hook needs: the loop it reports to, and whether it may."""

import threading
from threading import get_ident
from typing import Final

from torchperfd.faults import Faults
from torchperfd.loop import Loop

# threading.current_thread() would add a thread that Python did not start, and enumerate() locks.
_threads: Final[dict[int, threading.Thread]] = threading._active  # type: ignore[attr-defined]


class HookContext:
    """Shared by all hooks of one client.

    Attributes:
        active: False before install, after uninstall and in forked children.
    """

    __slots__ = ("active", "faults", "loop")

    def __init__(self, loop: Loop, faults: Faults) -> None:
        self.loop = loop
        self.faults = faults
        self.active = False

    def here(self) -> bool:
        """Return whether the calling thread is the one whose loop is followed."""
        return self.active and get_ident() == self.loop.thread

    def adopts(self) -> bool:
        """Follow the calling thread, where an optimizer steps, if the one so far does not train.

        Who attaches on the main thread may train on another. The first that steps is followed
        as long as it lives; a thread that only draws or evaluates is not.
        """
        if not self.active:
            return False
        loop = self.loop
        if self.on_autograds_thread() or (
            loop.thread in _threads and (loop.has_stepped or not loop.recorder.idle())
        ):
            return False
        loop.adopt(get_ident())
        return True

    def on_autograds_thread(self) -> bool:
        """Return whether Python has not started the calling thread: it serves someone's backward."""
        thread = _threads.get(get_ident())
        return thread is None or isinstance(thread, threading._DummyThread)

    def fault(self, place: str, error: BaseException) -> None:
        """Count an error of ours; the step in progress is lost, and all hooks go off at the limit."""
        self.faults.note(f"hook {place}", error)
        self.loop.recorder.abandon()
        if self.faults.spent(f"hook {place}"):
            self.active = False
