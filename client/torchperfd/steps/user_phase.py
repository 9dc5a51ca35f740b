"""What :meth:`torchperfd.client.Client.phase` returns."""

from torchperfd.events import EventBuffer, codes


class Phase:
    """A user phase; may be entered any number of times."""

    __slots__ = ("_buffer", "_slot")

    def __init__(self, buffer: EventBuffer, slot: int) -> None:
        self._buffer = buffer
        self._slot = slot

    def __enter__(self) -> "Phase":
        self._buffer.mark(codes.ENTER, self._slot)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._buffer.mark(codes.EXIT)
