"""A wait of the host for its device, with its line."""

from dataclasses import dataclass
from pathlib import PurePath


@dataclass(frozen=True, slots=True)
class SyncWait:
    """A line of the script that waits for the device.

    Attributes:
        file: Of the line.
        line: Its number.
        call: The name of what waits, such as ``item``.
        ns: The time for which it did in training steps, by samples.
    """

    file: str
    line: int
    call: str
    ns: int

    @property
    def place(self) -> tuple[str, int, str]:
        """All but the time."""
        return self.file, self.line, self.call

    @property
    def words(self) -> str:
        """Where it waits, such as ``item() at train.py:57``."""
        return f"{self.call}() at {PurePath(self.file).name}:{self.line}"
