"""Rate limit for log lines that other processes can cause."""

import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

PERIOD_S: Final = 10.0


class LogLimiter:
    """Writes each kind of line at most once in ten seconds, with the number of those that it left out.

    A kind is a message without its values; there are as many as the source has.
    """

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._next: dict[str, float] = {}
        self._left_out: Counter[str] = Counter()

    def warning(self, message: str, *values: object) -> None:
        """Log a warning, or count it."""
        self._line(logging.WARNING, message, values, with_traceback=False)

    def exception(self, message: str, *values: object) -> None:
        """Log an error with the traceback of the exception that is handled, or count it."""
        self._line(logging.ERROR, message, values, with_traceback=True)

    def _line(self, level: int, message: str, values: tuple[object, ...], *, with_traceback: bool) -> None:
        now = self._clock()
        if now < self._next.get(message, now):
            self._left_out[message] += 1
            return
        left_out = self._left_out.pop(message, 0)
        more = f" ({left_out} more like this since)" if left_out else ""
        self._next[message] = now + PERIOD_S
        self._log.log(level, message + more, *values, exc_info=with_traceback)
