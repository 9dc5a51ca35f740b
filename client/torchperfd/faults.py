"""Our own failures: counted, logged once each, never raised into training."""

from torchperfd.safety.logs import log

_LIMIT = 10


class Faults:
    """Counts internal errors by the place where they were caught.

    A place that fails ``limit`` times is switched off by the caller of :meth:`spent`.
    """

    def __init__(self, limit: int = _LIMIT) -> None:
        self._limit = limit
        self._counts: dict[str, int] = {}

    def note(self, place: str, error: BaseException) -> None:
        """Count an error; the first of its place is logged with its traceback."""
        seen = self._counts.get(place, 0)
        self._counts[place] = seen + 1
        if seen == 0:
            log.warning("%s failed; training goes on unaffected", place, exc_info=error)
        elif seen + 1 == self._limit:
            log.warning("%s failed %d times and is now off", place, self._limit)

    def spent(self, place: str) -> bool:
        """Return whether ``place`` has failed too often to be tried again."""
        return self._counts.get(place, 0) >= self._limit

    def counts(self) -> dict[str, int]:
        """Return errors by place."""
        return dict(self._counts)
