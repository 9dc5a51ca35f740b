"""Answers of the last second: several pages that read the same document have it made once."""

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from starlette.responses import Response

KEPT_S: Final = 0.9
_MOST: Final = 32
_MAX_BYTES: Final = 256 * 1024


class AnswerCache:
    """Keeps answers for a moment.

    Args:
        seconds: How long each is good for.
    """

    def __init__(self, seconds: float = KEPT_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._kept: OrderedDict[object, tuple[float, Response]] = OrderedDict()

    def get(self, key: object) -> Response | None:
        """Return the answer to the same request; None without a fresh one."""
        until, answer = self._kept.get(key, (0.0, None))
        return answer if self._clock() < until else None

    def add(self, key: object, answer: Response) -> None:
        """Keep an answer; a long one, or one that is an error, is not kept."""
        if answer.status_code != 200 or len(getattr(answer, "body", bytes(_MAX_BYTES + 1))) > _MAX_BYTES:
            return
        self._kept.pop(key, None)
        self._kept[key] = self._clock() + self._seconds, answer
        while len(self._kept) > _MOST:
            self._kept.popitem(last=False)

    def clear(self) -> None:
        """Forget all: something was changed."""
        self._kept.clear()
