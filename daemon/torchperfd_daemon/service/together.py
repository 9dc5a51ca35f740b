"""Merges several streams into one."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import TypeVar

T = TypeVar("T")


async def merged(streams: Sequence[AsyncIterator[T]]) -> AsyncIterator[T]:
    """Yield the streams' items as they arrive, until all streams have ended.

    Raises:
        Exception: Raised by a stream; the others are cancelled.
    """
    items: asyncio.Queue[T | None] = asyncio.Queue()

    async def forward(stream: AsyncIterator[T]) -> None:
        try:
            async for item in stream:
                items.put_nowait(item)
        finally:
            items.put_nowait(None)

    tasks = [asyncio.create_task(forward(stream)) for stream in streams]
    try:
        running = len(tasks)
        while running:
            item = await items.get()
            if item is None:
                running -= 1
            else:
                yield item
        for task in tasks:
            await task
    finally:
        for task in tasks:
            task.cancel()
        # Their streams have to be given up before ours is.
        await asyncio.gather(*tasks, return_exceptions=True)
