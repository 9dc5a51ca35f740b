"""What :meth:`torchperfd.client.Client.wrap` and :meth:`torchperfd.client.Client.phase` return."""

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from torchperfd.events import EventBuffer, codes

T = TypeVar("T")


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


class WrappedIterator(Generic[T], Iterator[T]):
    """Iterates over something that is not a DataLoader, timing each ``next()`` as ``data``.

    A DataLoader inside may be drawn from meanwhile: the batch that comes out here is the one that counts.
    """

    def __init__(
        self,
        iterable: Iterable[T],
        buffer: EventBuffer,
        begins: Callable[[object], None],
        samples_in: Callable[[Any], int],
    ) -> None:
        self._iterable = iterable
        self._iterator: Iterator[T] | None = None
        self._buffer = buffer
        self._begins = begins
        self._samples_in = samples_in

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._iterator is None:
            self._iterator = iter(self._iterable)
            self._begins(self)
        buffer = self._buffer
        here = buffer.mark(codes.OUTER_DRAW, id(self) | _without_gradients())
        try:
            batch = next(self._iterator)
        except BaseException:
            if here:
                buffer.mark(codes.EXHAUSTED, id(self))
            raise
        if here:
            buffer.mark(codes.OUTER_DRAWN, self._samples_in(batch))
        return batch


def _without_gradients() -> int:
    torch: Any = sys.modules.get("torch")
    if torch is None or torch.is_grad_enabled():
        return 0
    return codes.DRAW_WITHOUT_GRADIENTS
