"""Replace an attribute so that it can be put back exactly as it was."""

import weakref
from collections.abc import Callable
from typing import Any, Final

_ABSENT: Final = object()


class Patches:
    """Attributes we replaced, newest last."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def replace(self, owner: Any, name: str, replacement: Any) -> None:
        """Set ``owner.name`` of a class or module, remembering what was there.

        Raises:
            AttributeError: ``owner`` itself has no such attribute (an inherited one does not count).
        """
        if name not in vars(owner):
            raise AttributeError(f"{owner!r} has no attribute {name!r} of its own")
        original = vars(owner)[name]
        setattr(owner, name, replacement)

        def undo() -> None:
            # A later patch of other code is left alone: taking their patch away would break
            # them, and ours passes through once it is silenced.
            if vars(owner).get(name) is replacement:
                setattr(owner, name, original)

        self._undo.append(undo)

    def add(self, owner: type, name: str, value: Any) -> None:
        """Set an attribute of a class that has none of its own; undoing takes it away again."""
        setattr(owner, name, value)

        def undo() -> None:
            if vars(owner).get(name) is value:
                delattr(owner, name)

        self._undo.append(undo)

    def replace_own(self, instance: Any, name: str, replacement: Any) -> None:
        """Set an attribute in the instance's own dict, where there may be none so far.

        The instance is not kept alive, and none of its ``__setattr__`` is asked.
        """
        original = vars(instance).get(name, _ABSENT)
        vars(instance)[name] = replacement
        reference = weakref.ref(instance)

        def undo() -> None:
            alive = reference()
            if alive is None or vars(alive).get(name) is not replacement:
                return
            if original is _ABSENT:
                del vars(alive)[name]
            else:
                vars(alive)[name] = original

        self._undo.append(undo)

    def undo(self) -> None:
        """Put every original back, newest first."""
        while self._undo:
            self._undo.pop()()
