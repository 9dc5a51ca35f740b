"""Makes text from outside safe for a terminal, a log line and a metric label; writes the daemon's log.

Lines that other processes can cause are limited.
"""

import json
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, Final, TextIO

from torchperfd.model.formatting import one_line

_MAX_CHARACTERS: Final = 4096


def clean_fields(record: Any) -> None:
    """Make every text in a dataclass one line, in place; also in the lists of dataclasses that it holds."""
    for name in getattr(record, "__dataclass_fields__", ()):
        value = getattr(record, name)
        if isinstance(value, str):
            if not value.isprintable() or len(value) > _MAX_CHARACTERS:
                # A frozen record is as new here: nothing has read it yet.
                object.__setattr__(record, name, one_line(value, _MAX_CHARACTERS))
        else:
            for each in value if isinstance(value, list) else (value,):
                clean_fields(each)


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks in the form of ``--ranks``: 0-2,5.

    Args:
        ranks: Ranks in ascending order.
    """
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def ranks_phrase(ranks: Sequence[int], of: int = 0) -> str:
    """Return ranks as part of a sentence: ``rank 2``, ``ranks 0-2,5``, or ``all 8 ranks``.

    Args:
        ranks: Ranks in ascending order.
        of: The number of all ranks; 0 if all of them have no meaning here.
    """
    if len(ranks) == of > 1:
        return f"all {of} ranks"
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {ranks_text(ranks)}"


_TEXT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_JOURNAL: Final = "%(name)s: %(message)s"
# syslog(3): err, warning, info, debug.
_PRIORITIES: Final = ((logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6), (logging.NOTSET, 7))


class JsonFormatter(logging.Formatter):
    """A JSON object per record, in one line: ``time``, ``level``, ``logger``, ``message``, ``exception``.

    ``time`` is in UTC (RFC 3339); ``exception``, a traceback, is there only for a record that has one.
    """

    def format(self, record: logging.LogRecord) -> str:
        written = datetime.fromtimestamp(record.created, UTC)
        entry = {
            "time": written.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


class JournalFormatter(logging.Formatter):
    """Lines for systemd's journal: a priority in front of each, and no time, which the journal has.

    See sd-daemon(3). A record of several lines, such as a traceback, is several entries of one priority.

    Args:
        lines: Formats what follows the priority; the logger's name and the message by default.
    """

    def __init__(self, lines: logging.Formatter | None = None) -> None:
        super().__init__()
        self._lines = lines or logging.Formatter(_JOURNAL)

    def format(self, record: logging.LogRecord) -> str:
        """Return the record with ``<N>`` in front of each line."""
        priority = next(number for level, number in _PRIORITIES if record.levelno >= level)
        return "\n".join(f"<{priority}>{line}" for line in self._lines.format(record).split("\n"))


def configure_logging(level: str, style: str = "text", stream: TextIO | None = None) -> None:
    """Send the daemon's log to a stream.

    Args:
        level: What to log of our own; a name of logging's, in lower case. Libraries log from warnings on:
            their debug lines would hide ours.
        style: ``text``, or ``json`` for an object per line.
        stream: Destination; standard error by default.
    """
    target = stream or sys.stderr
    handler = logging.StreamHandler(target)
    lines = JsonFormatter() if style == "json" else None
    handler.setFormatter(JournalFormatter(lines) if is_journal(target) else lines or logging.Formatter(_TEXT))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("torchperfd").setLevel(level.upper())


def is_journal(stream: TextIO) -> bool:
    """Return whether a stream is the one that systemd connected to its journal; see sd_journal(3)."""
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


LIMIT_PERIOD_S: Final = 10.0


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
        self._next[message] = now + LIMIT_PERIOD_S
        self._log.log(level, message + more, *values, exc_info=with_traceback)
