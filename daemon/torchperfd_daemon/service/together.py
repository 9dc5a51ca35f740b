"""Several streams as one."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import TypeVar

T = TypeVar("T")


async def merged(streams: Sequence[AsyncIterator[T]]) -> AsyncIterator[T]:
    """Yield what the streams yield, as it comes, until all have ended.

    Raises:
        Exception: What a stream has raised; the others are given up.
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
