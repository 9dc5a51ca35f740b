"""Checkpoints: what is written with ``torch.save`` or torch's distributed checkpoints."""

import functools
import sys
from collections.abc import Callable
from threading import get_ident
from types import ModuleType
from typing import Any

from torchperfd.events import Timed, codes
from torchperfd.hooks.context import HookContext, own_attribute

_DISTRIBUTED = "torch.distributed.checkpoint"

_Wrap = Callable[[HookContext, Callable[..., Any]], Callable[..., Any]]


def install(context: HookContext) -> None:
    """Time ``torch.save``, and torch's distributed checkpoints once the script has imported them.

    What another thread saves, and what ``async_save`` leaves to one, is counted as saved in the background.
    """
    # Here, since this module is loaded before the script has imported torch.
    import torch
    import torch.serialization

    def time_distributed() -> None:
        module = sys.modules[_DISTRIBUTED]
        # Early releases have another way to save, or none in the background.
        for name, wrap in (("save", _counted), ("async_save", _followed)):
            if name in vars(module):
                _time(context, module, name, wrap)

    _time(context, torch, "save", _counted)
    context.when_imported(_DISTRIBUTED, time_distributed)


def _time(context: HookContext, module: ModuleType, name: str, wrap: _Wrap) -> None:
    """Time a wrapped function in the module that exports it and in its own one, where pickle looks for it."""
    original = own_attribute(module, name)
    timed = Timed(context.buffer, wrap(context, original), codes.SAVE, codes.SAVE_END)
    functools.update_wrapper(timed, original)
    for owner in {id(each): each for each in (module, sys.modules[original.__module__])}.values():
        if vars(owner).get(name) is original:
            context.patches.replace(owner, name, timed)


def _counted(context: HookContext, original: Callable[..., Any]) -> Callable[..., Any]:
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


def _followed(context: HookContext, original: Callable[..., Any]) -> Callable[..., Any]:
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
