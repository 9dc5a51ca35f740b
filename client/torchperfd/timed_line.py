"""A line of the script, with the time of the calls at it."""

from dataclasses import dataclass
from pathlib import PurePath


@dataclass(frozen=True, slots=True)
class TimedLine:
    """A line of the script, and the calls at it since attach.

    Attributes:
        file: Of the line.
        line: Its number.
        call: The name of what it calls, such as ``all_reduce``; empty if unknown.
        calls: How often it did.
        ns: The time that these calls took.
    """

    file: str
    line: int
    call: str
    calls: int
    ns: int

    @property
    def place(self) -> tuple[str, int, str]:
        """All but the numbers."""
        return self.file, self.line, self.call

    @property
    def words(self) -> str:
        """Where it is, such as ``all_reduce() at train.py:57``."""
        call = f"{self.call}() at " if self.call else ""
        return f"{call}{PurePath(self.file).name}:{self.line}"
