"""What every hook needs: the tape it writes on, and whether it may."""

import threading
from threading import get_ident
from typing import Final

from torchperfd.faults import Faults
from torchperfd.interrupts import is_from_script
from torchperfd.replay import Replay
from torchperfd.tape import Tape
from torchperfd.tape import events as on_tape

# threading.current_thread() would add a thread that Python did not start, and enumerate() locks.
_threads: Final[dict[int, threading.Thread]] = threading._active  # type: ignore[attr-defined]


class HookContext:
    """Shared by all hooks of one client."""

    __slots__ = ("faults", "replay", "tape")

    def __init__(self, tape: Tape, replay: Replay, faults: Faults) -> None:
        self.tape = tape
        self.replay = replay
        self.faults = faults

    @property
    def active(self) -> bool:
        """False after uninstall and in forked children."""
        return self.tape.thread != 0

    def silence(self) -> None:
        """Have every hook pass through at once, touching nothing."""
        self.tape.thread = 0

    def adopts(self) -> bool:
        """Follow the calling thread, where an optimizer steps, if the one so far does not train.

        Who attaches on the main thread may train on another. The first that steps is followed
        as long as it lives; a thread that only draws or evaluates is not.
        """
        tape = self.tape
        if not tape.thread or self.on_autograds_thread():
            return False
        if tape.thread in _threads:
            self.replay.catch_up()
            loop = self.replay.loop
            if loop.has_stepped or not loop.recorder.idle():
                return False
        tape.thread = get_ident()
        tape.write(on_tape.ADOPT)
        return True

    def on_autograds_thread(self) -> bool:
        """Return whether Python has not started the calling thread: it serves someone's backward."""
        thread = _threads.get(get_ident())
        return thread is None or isinstance(thread, threading._DummyThread)

    def absorb(self, place: str, error: BaseException) -> bool:
        """Deal with what was raised within a hook; the step in progress is lost.

        Returns:
            True for an error of ours, which is counted; all hooks go off at the limit. False for what the
            script raised meanwhile, as its signal handlers do: raise it again.
        """
        if self.tape.thread:
            self.tape.write(on_tape.ABANDON)
        if is_from_script(error):
            return False
        self.faults.note(f"hook {place}", error)
        if self.faults.spent(f"hook {place}"):
            self.silence()
        return True
