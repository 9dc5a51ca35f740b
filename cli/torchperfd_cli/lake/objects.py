"""The objects of the lake as a reader sees them: what there is, and files to load."""

import asyncio
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from torchperfd_daemon.captures.destination import Destination

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_AT_ONCE: Final = 32
_FORMS: Final = (".parquet", ".jsonl.gz")


class LakeObjects:
    """Lists and fetches the objects of a lake.

    Args:
        url: As in ``serve --lake``; credentials come from the environment.

    Raises:
        UsageError: It is no such URL.
        TorchperfdError: obstore is not installed.
    """

    def __init__(self, url: str, environment: Mapping[str, str] = os.environ) -> None:
        self._destination = Destination(url, environment)

    def keys(self, table: str, dates: Iterable[str]) -> Iterator[str]:
        """Yield the keys of a table's objects on some days.

        Raises:
            TorchperfdError: The store does not answer.
        """
        for date in dates:
            yield from asyncio.run(self._keys(f"table={table}/date={date}/"))

    async def _keys(self, prefix: str) -> list[str]:
        # The store stays in here: asyncio.run() may print what it returns, which a store of Azure forbids.
        import obstore

        with self._destination.translating(prefix):
            store = await self._destination.opened()
            listed = [each["path"] for chunk in obstore.list(store, prefix) for each in chunk]
        return [path for path in listed if path.endswith(_FORMS)]

    def fetch(self, keys: Sequence[str], folder: Path) -> list[Path]:
        """Return files with the content of objects, below a folder under their keys.

        Raises:
            TorchperfdError: The store does not answer.
        """
        return asyncio.run(self._fetch(keys, folder))

    async def _fetch(self, keys: Sequence[str], folder: Path) -> list[Path]:
        store = await self._destination.opened()
        free = asyncio.Semaphore(_AT_ONCE)

        async def fetch(key: str) -> Path:
            async with free:
                return await self._fetch_one(store, key, folder / key)

        return await asyncio.gather(*map(fetch, keys))

    async def _fetch_one(self, store: "ObjectStore", key: str, path: Path) -> Path:
        import obstore

        with self._destination.translating(key):
            content = await (await obstore.get_async(store, key)).bytes_async()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return path
