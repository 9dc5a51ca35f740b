"""The queue of a DataLoader's workers: how many batches are ready when the loop asks for one."""

from typing import Any

from torchperfd.events import codes
from torchperfd.hooks.context import HookContext
from torchperfd.hooks.frames import keep_out_of_graphs
from torchperfd.safety.interrupts import is_from_script


def install(context: HookContext) -> None:
    """Write how many batches are ready ahead of every draw from workers."""
    buffer = context.buffer

    def at_draw(iterator: Any) -> bool:
        if iterator._num_workers:
            buffer.mark(codes.READY, ready_batches(iterator) + 1)
        return False

    for function in (at_draw, ready_batches):
        keep_out_of_graphs(function)
    context.links.before_draw.append(context.guard(at_draw, False))


def ready_batches(iterator: Any) -> int:
    """Return how many batches the workers have ready, -1 where that is unknown."""
    try:
        size: int = iterator._worker_result_queue.qsize()
    except (NotImplementedError, OSError) as error:
        if is_from_script(error):
            raise
        return -1  # macOS has no count; the queue may be closing
    return size
