"""Rate limit for log lines that other processes can cause."""

import logging
import time
from collections.abc import Callable
from typing import Final

PERIOD_S: Final = 10.0


class LogLimiter:
    """Writes at most one line each ten seconds, with the number of lines that it left out before."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._next = float("-inf")
        self._left_out = 0

    def warning(self, message: str, *values: object) -> None:
        """Log a warning, or count it."""
        self._line(logging.WARNING, message, values, with_traceback=False)

    def exception(self, message: str, *values: object) -> None:
        """Log an error with the traceback of the exception that is handled, or count it."""
        self._line(logging.ERROR, message, values, with_traceback=True)

    def _line(self, level: int, message: str, values: tuple[object, ...], *, with_traceback: bool) -> None:
        now = self._clock()
        if now < self._next:
            self._left_out += 1
            return
        more = f" ({self._left_out} more like this since)" if self._left_out else ""
        self._next, self._left_out = now + PERIOD_S, 0
        self._log.log(level, message + more, *values, exc_info=with_traceback)
