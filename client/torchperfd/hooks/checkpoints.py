"""Checkpoints: the time of ``torch.save`` and torch's distributed checkpoints, and of saves by other threads.

Loaded before torch is: it imports torch only when the hook is installed.
"""

import functools
import sys
import time
from collections import deque
from collections.abc import Callable
from itertools import count
from threading import get_ident
from types import ModuleType
from typing import Any

from torchperfd.events import Timed, codes
from torchperfd.hooks.context import HookContext, own_attribute


class BackgroundSaves:
    """Counts saves in the background, and for how long at least one was under way; no lock.

    :meth:`begin` and :meth:`end` may be called on any thread, everything else belongs to one.

    Attributes:
        calls: How often one has begun while no other was under way: a save may use several threads.
        training_waits: Whether the training thread waits for a save of its own.
    """

    __slots__ = ("_clock", "_ended", "_ids", "_ns", "_open", "_until", "calls", "training_waits")

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.calls = 0
        self.training_waits = False
        self._clock = clock
        self._ids = count(1)
        # By id, when a save began; and from when to when those took that have ended since the last look.
        self._open: dict[int, int] = {}
        self._ended: deque[tuple[int, int, int]] = deque()
        self._ns = 0
        self._until = 0

    def begin(self) -> int:
        save = next(self._ids)
        self.calls += not self._open
        self._open[save] = self._clock()
        return save

    def end(self, save: int) -> None:
        """A save has ended; a second call has no effect."""
        began = self._open.get(save)
        if began is not None:
            # In this order, and looked at in the other: a save that ends meanwhile is never in neither.
            self._ended.append((save, began, self._clock()))
            self._open.pop(save, None)

    def ns(self) -> int:
        """Return for how many nanoseconds at least one save was under way until now."""
        now = self._clock()
        intervals = {save: (began, now) for save, began in [*self._open.items()]}
        while self._ended:
            save, began, ended = self._ended.popleft()
            intervals[save] = began, ended
        for began, ended in sorted(intervals.values()):
            self._ns += max(0, ended - max(began, self._until))
            self._until = max(self._until, ended)
        return self._ns


_DISTRIBUTED = "torch.distributed.checkpoint"

_Wrap = Callable[[HookContext, Callable[..., Any]], Callable[..., Any]]


def install_checkpoints(context: HookContext) -> None:
    """Time ``torch.save``, and torch's distributed checkpoints once the script has imported them.

    What another thread saves, and what ``async_save`` leaves to one, is counted as saved in the background.
    """
    # Here, since this module is loaded before the script has imported torch.
    import torch
    import torch.serialization

    def time_distributed() -> None:
        module = sys.modules[_DISTRIBUTED]
        # Early releases have another way to save, or none in the background.
        for name, wrap in (("save", _count_background_save), ("async_save", _follow_async_save)):
            if name in vars(module):
                _time_save(context, module, name, wrap)

    _time_save(context, torch, "save", _count_background_save)
    context.when_imported(_DISTRIBUTED, time_distributed)


def _time_save(context: HookContext, module: ModuleType, name: str, wrap: _Wrap) -> None:
    """Time a wrapped function in the module that exports it and in its own one, where pickle looks for it."""
    original = own_attribute(module, name)
    timed = Timed(context.buffer, wrap(context, original), codes.SAVE, codes.SAVE_END)
    functools.update_wrapper(timed, original)
    for owner in {id(each): each for each in (module, sys.modules[original.__module__])}.values():
        if vars(owner).get(name) is original:
            context.patches.replace(owner, name, timed)


def _count_background_save(context: HookContext, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that saves, and counts the saves of other threads than the one that trains.

    Threads that write while the training thread waits for its own save are part of that one.
    """
    saves = context.links.background_saves

    @functools.wraps(original)
    def save(*args: Any, **kwargs: Any) -> Any:
        if not context.active:
            return original(*args, **kwargs)
        if get_ident() == context.buffer.thread:
            outer, saves.training_waits = saves.training_waits, True
            try:
                return original(*args, **kwargs)
            finally:
                saves.training_waits = outer
        number = 0 if saves.training_waits else saves.begin()
        try:
            return original(*args, **kwargs)
        finally:
            saves.end(number)

    return save


def _follow_async_save(context: HookContext, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that starts a save, which is counted until its future is done."""
    saves = context.links.background_saves

    def follow(response: Any) -> None:
        # Where staging goes on in the background as well, there is a future for each of the two.
        future = getattr(response, "upload_completion", response)
        if not hasattr(future, "add_done_callback"):
            return
        number = saves.begin()
        try:
            future.add_done_callback(lambda _: saves.end(number))
        except BaseException:
            saves.end(number)
            raise

    follow_safely = context.guard(follow, None)

    @functools.wraps(original)
    def async_save(*args: Any, **kwargs: Any) -> Any:
        response = original(*args, **kwargs)
        if context.active:
            follow_safely(response)
        return response

    return async_save
