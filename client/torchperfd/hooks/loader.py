"""Draws: how long the loop waits for its DataLoader."""

from collections.abc import Callable
from typing import Any

from torch.utils.data import dataloader

from torchperfd.hooks.batches import samples_in
from torchperfd.hooks.context import HookContext
from torchperfd.hooks.patches import Patches


def install(context: HookContext, patches: Patches, before_draw: Callable[[], None]) -> None:
    """Time ``next()`` of every DataLoader iterator, whatever its class and worker count.

    Args:
        context: Where to report.
        patches: Where to remember the original.
        before_draw: Called ahead of each draw, outside of any step's time.
    """
    iterator = dataloader._BaseDataLoaderIter
    original = vars(iterator)["__next__"]
    loop = context.loop

    def __next__(self: Any) -> Any:  # noqa: N807 - the name shows in tracebacks
        if not context.here():
            return original(self)
        try:
            before_draw()
            loop.draw_begin()
        except Exception as error:  # noqa: BLE001 - nothing of ours may reach training
            context.fault("draw", error)
            return original(self)
        try:
            batch = original(self)
        except BaseException:
            try:
                loop.draw_stop()
            except Exception as error:  # noqa: BLE001
                context.fault("draw", error)
            raise
        try:
            loop.draw_end(samples_in(batch))
        except Exception as error:  # noqa: BLE001
            context.fault("draw", error)
        return batch

    patches.replace(iterator, "__next__", __next__)
