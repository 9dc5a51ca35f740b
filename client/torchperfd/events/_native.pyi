"""Types of the C module."""

import weakref
from collections.abc import Callable
from typing import Any

ABI: str

class EventBuffer:
    """Events of one thread, in a ring of fixed size."""

    def __init__(self, capacity: int, cuda_event_code: int = 0) -> None: ...
    thread: int
    steps_open: int
    muted: int
    on_event: Callable[[], object] | None
    on_low: Callable[[], object] | None
    on_full: Callable[[], object] | None
    cuda_event_id: Callable[[], int] | None
    @property
    def lost(self) -> int: ...
    def mark(self, code: int, argument: int = 0, /) -> bool: ...
    def write(self, code: int, argument: int = 0, /) -> None: ...
    def here(self) -> bool: ...
    def peek(self) -> bytes: ...
    def skip(self, count: int, /) -> None: ...
    def __len__(self) -> int: ...

class Timed:
    """A function or method between two events."""

    original: Callable[..., Any]
    def __init__(
        self, buffer: EventBuffer, original: Callable[..., Any], begin: int, end: int, failed: int = -1
    ) -> None: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __get__(self, instance: object, owner: type | None = None) -> Callable[..., Any]: ...

class Draws:
    """The ``__next__`` of an iterator over batches, between two events."""

    watching: bool
    known: int
    def __init__(
        self,
        buffer: EventBuffer,
        original: Callable[[Any], Any],
        begin: int,
        end: int,
        failed: int,
        plain: type,
        tensor: type,
        ahead: Callable[[Any], bool],
        samples_in: Callable[[Any], int],
        grad_enabled: Callable[[], bool],
        models: list[weakref.ref[Any]],
    ) -> None: ...
    def __call__(self, iterator: Any) -> Any: ...
    def __get__(self, instance: object, owner: type | None = None) -> Callable[..., Any]: ...

class IndexLists:
    """The next indices of an iterator over batches, which are noted."""

    def __init__(
        self,
        buffer: EventBuffer,
        original: Callable[[Any], Any],
        draws: Draws,
        plain: type,
        kind: str,
        map_style: object,
        note: Callable[[Any, Any], None],
        otherwise: Callable[[Any], Any],
    ) -> None: ...
    def __call__(self, iterator: Any) -> Any: ...
    def __get__(self, instance: object, owner: type | None = None) -> Callable[..., Any]: ...

class Forward:
    """The call of one module, between two events."""

    def __init__(
        self,
        buffer: EventBuffer,
        module: Any,
        compiled: Callable[..., Any] | None,
        method: str,
        grad_enabled: Callable[[], bool],
        train: int,
        evaluate: int,
        end: int,
    ) -> None: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

class Steps:
    """What the hooks around every optimizer step call."""

    def __init__(
        self, buffer: EventBuffer, known: dict[int, weakref.ref[Any]], begin: int, end: int
    ) -> None: ...
    def begin(self, optimizer: object, /) -> bool: ...
    def end(self, optimizer: object, /) -> bool: ...
