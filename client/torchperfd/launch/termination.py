"""How a script under ``torchperfd run`` ends: by SIGTERM, with an exit code, or by an error.

SIGTERM concludes the run, and then ends the process. It is left alone where its action is not the default one
when the script begins or when it comes: a handler of the script replaces ours. Forked children end at once.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from torchperfd._version import NATIVE_ABI
from torchperfd.model.terminal_text import without_codes
from torchperfd.runs.ending import (
    FAILED,
    FINISHED,
    INTERRUPTED,
    TERMINATED,
    RankFailure,
    explain_error,
    first_failure,
)

if TYPE_CHECKING:
    from torchperfd.v1 import control_pb2


try:
    from torchperfd.launch import _sigterm
except ImportError:  # nothing was compiled: SIGTERM ends the process at once
    _sigterm = None  # type: ignore[assignment]

HANDLES_SIGTERM: Final = getattr(_sigterm, "ABI", "") == NATIVE_ABI
MAX_TERMINATION_S: Final = 3.0
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
        self._is_installed = HANDLES_SIGTERM and _sigterm.install(MAX_TERMINATION_S)
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
                self._is_concluded.wait(MAX_TERMINATION_S)
        except Exception as error:  # noqa: BLE001 - the process ends, whatever has happened
            sys.stderr.write(f"torchperfd: the report could not be made: {error}\n")
        finally:
            _sigterm.end()


_MAX_ERROR_CHARACTERS: Final = 200
_MAX_CHAINED_ERRORS: Final = 16
_SHARED_MEMORY: Final = "/dev/shm"


def exit_document(ended: BaseException | None) -> dict[str, Any]:
    """Return the state, exit code and error of a script's end, as a run's document has them.

    Args:
        ended: What the script raised; None where it reached its end.
    """
    if ended is None:
        return {"state": FINISHED, "code": 0}
    if isinstance(ended, SystemExit):
        if ended.code in (None, 0):
            return {"state": FINISHED, "code": 0}
        if isinstance(ended.code, int):
            return {"state": FAILED, "code": ended.code, "error": f"exit code {ended.code}"}
        return {"state": FAILED, "code": 1, "error": _first_line(ended.code)}
    if isinstance(ended, KeyboardInterrupt):
        return {"state": INTERRUPTED, "code": 130}
    if isinstance(ended, Terminated):
        return {"state": TERMINATED, "code": 143}
    return {"state": FAILED, "code": 1, "error": _error_words(ended)}


def failure_words(ended: BaseException | None) -> str:
    """Return the error of a script that has failed, in one line; empty if it has not."""
    document = exit_document(ended)
    return str(document.get("error") or FAILED) if document["state"] == FAILED else ""


def cause_elsewhere(answer: "control_pb2.GetRunResponse | None", own_rank: int) -> str:
    """Return which other rank's failure came first, in words; empty if none did.

    Args:
        answer: What the daemon knows of the run; None if no daemon has answered.
    """
    from torchperfd.v1 import session_pb2

    failures = []
    for rank in answer.ranks if answer is not None else ():
        steps = sum(k.steps for k in rank.account.kinds if k.kind == session_pb2.STEP_KIND_TRAIN)
        if rank.failure:
            number = rank.identity.rank
            failures.append(RankFailure(number, rank.failure, steps, rank.failed_unix_seconds))
    return first_failure(failures, own_rank)


def _error_words(error: BaseException) -> str:
    """Return an exception in one line, or that among its causes which shows why it came to it."""
    words = [_one_line(each) for each in _chain(error)]
    shared_memory = _shared_memory()
    explained = (explain_error(each, shared_memory) for each in words)
    return next((found for found, each in zip(explained, words, strict=True) if found != each), words[0])


def _chain(error: BaseException) -> list[BaseException]:
    """Return an exception and those that it was raised from or while handling, the last one first."""
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in chain and len(chain) < _MAX_CHAINED_ERRORS:
        chain.append(current)
        current = current.__cause__ or current.__context__
    return chain


def _one_line(error: BaseException) -> str:
    message = _first_line(error)
    name = type(error).__name__
    return f"{name}: {message}" if message else name


def _first_line(error: object) -> str:
    text = ""
    # The script's own exception may have a broken __str__.
    with contextlib.suppress(Exception):
        text = without_codes(str(error))
    lines = (line.strip() for line in text.splitlines())
    return next((line[:_MAX_ERROR_CHARACTERS] for line in lines if line), "")


def _shared_memory() -> tuple[int, int] | None:
    """Return the size of the shared memory's file system and what of it is in use, in bytes."""
    try:
        status = os.statvfs(_SHARED_MEMORY)
    except OSError:
        return None
    return status.f_blocks * status.f_frsize, (status.f_blocks - status.f_bfree) * status.f_frsize
