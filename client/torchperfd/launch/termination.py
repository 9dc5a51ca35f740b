"""SIGTERM under ``torchperfd run``: the run is concluded, and then the signal ends the process.

It is left alone where its action is not the default one when the script begins or when it comes: a handler of
the script replaces ours. Forked children die of it at once.
"""

import os
import sys
import threading
from collections.abc import Callable
from typing import Final

from torchperfd._version import NATIVE_ABI

try:
    from torchperfd.launch import _sigterm
except ImportError:  # nothing was compiled: SIGTERM ends the process at once
    _sigterm = None  # type: ignore[assignment]

AVAILABLE: Final = getattr(_sigterm, "ABI", "") == NATIVE_ABI
LONGEST_S: Final = 3.0
"""From SIGTERM to the end of the process."""


class Terminated(BaseException):
    """What has ended a script that SIGTERM ends; never raised."""


class TerminationWatch:
    """Waits for SIGTERM on a thread of its own, since the main thread may be stuck.

    Either that thread concludes the run or, where the script has ended before, the main thread. The script
    goes on meanwhile: a main thread that was stopped anywhere could hold a lock, such as that of imports.

    Args:
        conclude: Concludes the run; called on that thread.
    """

    def __init__(self, conclude: Callable[[], None]) -> None:
        self._conclude = conclude
        self._is_claimed = threading.Lock()
        self._is_concluded = threading.Event()
        self._is_installed = False

    def begin(self) -> None:
        """Watch from now on."""
        self._is_installed = AVAILABLE and _sigterm.install(LONGEST_S)
        if self._is_installed:
            os.register_at_fork(after_in_child=_sigterm.release)
            threading.Thread(target=self._run, name="torchperfd-sigterm", daemon=True).start()

    def claim(self) -> None:
        """Have the main thread conclude the run; does not return if SIGTERM has come before."""
        if self._is_installed and not self._is_claimed.acquire(blocking=False):
            _sigterm.hold()

    def end(self) -> None:
        """Watch no longer; does not return if SIGTERM has come before."""
        self._is_concluded.set()
        if self._is_installed and _sigterm.release():
            _sigterm.hold()

    def _run(self) -> None:
        if not _sigterm.wait():
            return
        try:
            if self._is_claimed.acquire(blocking=False):
                self._conclude()
            else:
                self._is_concluded.wait(LONGEST_S)
        except Exception as error:  # noqa: BLE001 - the process ends, whatever has happened
            sys.stderr.write(f"torchperfd: the report could not be made: {error}\n")
        finally:
            _sigterm.end()
