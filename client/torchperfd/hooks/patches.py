"""Replace an attribute so that it can be put back exactly as it was."""

from typing import Any


class Patches:
    """Attributes we replaced, newest last."""

    def __init__(self) -> None:
        self._applied: list[tuple[Any, str, Any, Any]] = []

    def replace(self, owner: Any, name: str, replacement: Any) -> None:
        """Set ``owner.name``, remembering what was there.

        Raises:
            AttributeError: ``owner`` itself has no such attribute (an inherited one does not count).
        """
        try:
            original = vars(owner)[name]
        except KeyError:
            raise AttributeError(f"{owner!r} has no attribute {name!r} of its own") from None
        setattr(owner, name, replacement)
        self._applied.append((owner, name, original, replacement))

    def undo(self) -> None:
        """Put every original back, newest first.

        An attribute that somebody has replaced since is left alone: taking their patch away
        would break them, and ours passes through once its context is inactive.
        """
        while self._applied:
            owner, name, original, replacement = self._applied.pop()
            if vars(owner).get(name) is replacement:
                setattr(owner, name, original)
