"""Types of the C module."""

from collections.abc import Callable
from typing import final

from torchperfd_daemon.analysis.trace import Float64, Int32, Int64

ABI: str

class Interner:
    """Remembers the numbers that a callback gives to texts."""

    def __init__(self, callback: Callable[[bytes], int], /) -> None: ...

@final
class Batch:
    """A list of sound events; it keeps the text.

    Attributes:
        closed_at: The position of the bracket that closes the list.
    """

    closed_at: int
    def counts(self) -> tuple[int, int, int, int, int]:
        """Return rows, events, those without times and with impossible ones, and the end of the recording."""

    def columns(
        self, names: Interner, categories: Interner, threads: Interner, shapes: Interner, types: Interner, /
    ) -> tuple[bytes, ...]:
        """Return the columns of `BatchColumns`, with a value for each row."""

    def collectives(self) -> tuple[list[int], list[bytes]]:
        """Return the rows of the collectives, and the JSON of their arguments."""

    def memory(self) -> list[bytes]:
        """Return the JSON of the events of memory."""

def parse(text: bytes | bytearray | memoryview, /) -> Batch | None:
    """Parse the list of events with which a text begins; None if not all are sound and plain."""

def nest(starts: Int64, ends: Int64, threads: Int32, parents: Int64, stops: Int64, /) -> None:
    """Fill the positions of parents and stops for calls in order of (thread, start, -end)."""

def sweep(columns: tuple[Int64 | Float64, ...], offset: float, is_first: bool, /) -> None:
    """Fill the last three columns, in the order of ``advice.sweep``: streams, nodes and ends."""
