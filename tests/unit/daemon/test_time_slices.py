"""Long work on the event loop lets others run."""

import asyncio

from torchperfd_daemon.web.runs_api import in_slices


def test_in_slices_long_work_others_run_between() -> None:
    now = [0.0]
    order: list[str] = []

    async def work() -> None:
        async for number in in_slices(range(4), 0.005, lambda: now[0]):
            order.append(str(number))
            now[0] += 0.003

    async def other() -> None:
        order.append("other")

    async def both() -> None:
        await asyncio.gather(work(), other())

    asyncio.run(both())
    assert order == ["0", "1", "other", "2", "3"]


def test_in_slices_short_work_is_not_divided() -> None:
    order: list[str] = []

    async def work() -> None:
        async for number in in_slices("ab", 0.005, lambda: 0.0):
            order.append(number)

    async def other() -> None:
        order.append("other")

    async def both() -> None:
        await asyncio.gather(work(), other())

    asyncio.run(both())
    assert order == ["a", "b", "other"]
