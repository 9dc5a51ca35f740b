"""Draws: how long the loop waits for its DataLoader."""

import sys
from collections.abc import Callable
from typing import Any

from torch.utils.data import dataloader

from torchperfd.hooks.batches import samples_in
from torchperfd.hooks.context import HookContext
from torchperfd.hooks.frames import inside_step, keep_out_of_graphs
from torchperfd.hooks.patches import Patches
from torchperfd.recorder import OPTIMIZER


def install(
    context: HookContext,
    patches: Patches,
    before_draw: Callable[[], None],
    after_last: Callable[[], None],
) -> None:
    """Time ``next()`` of every DataLoader iterator, whatever its class and worker count.

    Args:
        context: Where to report.
        patches: Where to remember the original.
        before_draw: Called ahead of each draw, outside of any step's time.
        after_last: Called once a loader is exhausted.
    """
    iterator = dataloader._BaseDataLoaderIter
    original = vars(iterator)["__next__"]
    loop = context.loop
    recorder = loop.recorder

    def __next__(self: Any) -> Any:  # noqa: N807 - the name shows in tracebacks
        if not context.here():
            return original(self)
        try:
            before_draw()
            if self._num_workers:
                loop.ready = _ready(self)
            if recorder.depth and recorder.inside(OPTIMIZER) and inside_step(sys._getframe(1)):
                loop.closure_draw_begin()
            else:
                loop.draw_begin()
        except Exception as error:  # noqa: BLE001 - nothing of ours may reach training
            context.fault("draw", error)
            return original(self)
        try:
            batch = original(self)
        except BaseException:
            try:
                loop.draw_stop()
                after_last()
            except Exception as error:  # noqa: BLE001
                context.fault("draw", error)
            raise
        try:
            loop.draw_end(samples_in(batch))
        except Exception as error:  # noqa: BLE001
            context.fault("draw", error)
        return batch

    keep_out_of_graphs(samples_in)
    patches.replace(iterator, "__next__", keep_out_of_graphs(__next__))


def _ready(iterator: Any) -> int:
    """Return how many batches the workers have ready, -1 where that cannot be told."""
    try:
        size: int = iterator._worker_result_queue.qsize()
    except (AttributeError, NotImplementedError, OSError):
        return -1  # macOS has no count; the queue may be closing
    return size
