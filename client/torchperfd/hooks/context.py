"""What every hook needs: the loop it reports to, and whether it may."""

from threading import get_ident

from torchperfd.faults import Faults
from torchperfd.loop import Loop


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

    def fault(self, place: str, error: BaseException) -> None:
        """Count an error of ours; the step in progress is lost, and all hooks go off at the limit."""
        self.faults.note(f"hook {place}", error)
        self.loop.recorder.abandon()
        if self.faults.spent(f"hook {place}"):
            self.active = False
