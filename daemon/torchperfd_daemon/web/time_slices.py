"""Divides long work on the event loop into slices, between which the loop runs everything else."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Final, TypeVar

T = TypeVar("T")

SLICE_S: Final = 0.002


async def in_slices(
    items: Iterable[T], seconds: float = SLICE_S, clock: Callable[[], float] = time.perf_counter
) -> AsyncIterator[T]:
    """Yield items; where work on them has held the loop for so many seconds, let others run first."""
    began = clock()
    for item in items:
        if clock() - began >= seconds:
            await asyncio.sleep(0)
            began = clock()
        yield item
