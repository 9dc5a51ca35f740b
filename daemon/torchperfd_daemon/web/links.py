"""Addresses that work without the token for a minute, for a browser that opens or saves a file."""

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, Generic, TypeVar

T = TypeVar("T")

LINK_S: Final = 60.0
_MOST: Final = 64


class Links(Generic[T]):
    """Keys that cannot be guessed, each for one thing and for a minute; of too many the oldest is dropped."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._links: OrderedDict[str, tuple[float, T]] = OrderedDict()

    def add(self, target: T) -> str:
        """Return the path of a new link to something."""
        while len(self._links) >= _MOST:
            self._links.popitem(last=False)
        key = secrets.token_urlsafe(24)
        self._links[key] = self._clock() + LINK_S, target
        return f"/links/{key}"

    def find(self, key: str) -> T | None:
        """Return what a link leads to; None once its minute is over."""
        until, target = self._links.get(key, (0.0, None))
        return target if self._clock() < until else None
