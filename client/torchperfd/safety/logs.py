"""The package's log, and our own failures: counted, logged once each, never raised into training.

The log harms nothing whatever the handlers are that a script has installed. ``logging`` keeps what a handler
raises to itself, or lets it out, as the handler decides. Neither may happen on the main thread, where a
signal handler of the script may be what has raised; nor may a broken handler end a thread of ours. So the
main thread has another one write, and what comes out there ends there.
"""

import contextlib
import logging
import sys
import threading
from collections import deque
from typing import Any, Final

from torchperfd.safety.interrupts import is_from_script

_MAX_HELD: Final = 16
_MAX_WAIT_S: Final = 1.0
"""The main thread waits no longer: it may itself hold the lock of a handler."""


class Log:
    """Writes to one of ``logging``'s loggers; its methods are named like theirs.

    Args:
        name: The logger's.
    """

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)
        self._held: deque[str] | None = None
        self._warned: set[str] = set()

    def hold(self) -> None:
        """Write nothing from now on and keep the newest warnings: the script has not asked for this package.

        A logger of this name that has handlers of its own goes on as before.
        """
        self._held = deque(maxlen=_MAX_HELD)

    def release(self) -> list[str]:
        """Return the warnings that were kept, each once, and write again."""
        held, self._held = self._held, None
        return list(dict.fromkeys(held or ()))

    def debug(self, message: str, *args: object, exc_info: BaseException | None = None) -> None:
        """Write for those who debug this package."""
        self._write(logging.DEBUG, message, args, exc_info)

    def info(self, message: str, *args: object, exc_info: BaseException | None = None) -> None:
        """Write what a user may want to know."""
        self._write(logging.INFO, message, args, exc_info)

    def warning(self, message: str, *args: object, exc_info: BaseException | None = None) -> None:
        """Write what a user should know."""
        self._write(logging.WARNING, message, args, exc_info)

    def warn_once(self, message: str) -> None:
        """Write what a user should know, and whose cause recurs."""
        if message not in self._warned:
            self._warned.add(message)
            self.warning("%s", message)

    def exception(self, message: str, *args: object) -> None:
        """Write an error with the traceback of the exception that is being handled."""
        self._write(logging.ERROR, message, args, sys.exc_info()[1])

    def _write(self, level: int, message: str, args: tuple[object, ...], error: BaseException | None) -> None:
        if not self._logger.isEnabledFor(level):
            return
        held = self._held
        if held is not None and not self._logger.handlers:
            if level >= logging.WARNING:
                with contextlib.suppress(Exception):  # arguments that have no text
                    words = message % args if args else message
                    held.append(words if error is None else f"{words} ({type(error).__name__}: {error})")
            return
        caller = sys._getframe(2)
        record = self._logger.makeRecord(
            self._logger.name,
            level,
            caller.f_code.co_filename,
            caller.f_lineno,
            message,
            args,
            None if error is None else (type(error), error, error.__traceback__),
            caller.f_code.co_name,
        )
        if threading.get_ident() != threading.main_thread().ident:
            self._emit(record)
            return
        writing = threading.Thread(target=self._emit, args=(record,), name="torchperfd-log", daemon=True)
        try:
            writing.start()
        except RuntimeError as unable:  # the interpreter is about to end
            if is_from_script(unable):
                raise
            self._emit(record)
            return
        writing.join(_MAX_WAIT_S)

    def _emit(self, record: Any) -> None:
        with contextlib.suppress(BaseException):  # a handler of the script's is broken
            self._logger.handle(record)


log: Final = Log("torchperfd")


_MAX_FAILURES = 10


class Faults:
    """Counts internal errors by the place where they were caught.

    A place that fails ``limit`` times is switched off by the caller of :meth:`spent`.
    """

    def __init__(self, limit: int = _MAX_FAILURES) -> None:
        self._limit = limit
        self._counts: dict[str, int] = {}

    def note(self, place: str, error: BaseException) -> None:
        """Count an error; the first of its place is logged with its traceback."""
        seen = self._counts.get(place, 0)
        self._counts[place] = seen + 1
        if seen == 0:
            log.warning("%s failed; training goes on unaffected", place, exc_info=error)
        elif seen + 1 == self._limit:
            log.warning("%s failed %d times and is now off", place, self._limit)

    def spent(self, place: str) -> bool:
        """Return whether ``place`` has failed too often to be tried again."""
        return self._counts.get(place, 0) >= self._limit

    def counts(self) -> dict[str, int]:
        return dict(self._counts)
