"""The objects of the lake as a reader sees them: what there is, and files to load."""

import asyncio
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from torchperfd_daemon.captures.destination import Destination

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_AT_ONCE: Final = 64
_LISTS_AT_ONCE: Final = 8
_FORMS: Final = (".parquet", ".jsonl.gz")
_GLOB: Final = frozenset("*?[")
"""Characters that DuckDB expands in the path of a file."""


class LakeObjects:
    """Lists and fetches the objects of a lake.

    Args:
        url: As in ``serve --lake``; credentials come from the environment.

    Raises:
        UsageError: It is no such URL.
        TorchperfdError: obstore is not installed.
    """

    def __init__(self, url: str, environment: Mapping[str, str] = os.environ) -> None:
        self._destination = Destination(url, environment, keeps_connections=True)

    def keys(self, table: str, dates: Iterable[str]) -> list[str]:
        """Return the keys of a table's objects on some days.

        Raises:
            TorchperfdError: The store does not answer.
        """
        return asyncio.run(self._keys([f"table={table}/date={date}/" for date in dates]))

    async def _keys(self, prefixes: Sequence[str]) -> list[str]:
        # The store stays in here: asyncio.run() may print what it returns, which a store of Azure forbids.
        with self._destination.translating(prefixes[0] if prefixes else ""):
            store = await self._destination.opened()
        free = asyncio.Semaphore(_LISTS_AT_ONCE)

        async def listed(prefix: str) -> list[str]:
            import obstore

            async with free:
                with self._destination.translating(prefix):
                    found = [each["path"] async for chunk in obstore.list(store, prefix) for each in chunk]
            return [path for path in found if path.endswith(_FORMS)]

        # A store answers with a thousand keys at a time: days are listed beside each other.
        return [key for keys in await asyncio.gather(*map(listed, prefixes)) for key in keys]

    def files(self, keys: Sequence[str], folder: Path) -> list[Path]:
        """Return a file with the content of each object: the object itself in a folder, else a copy.

        Args:
            folder: Where copies go; made if there are any.

        Raises:
            TorchperfdError: The store does not answer.
        """
        shared = self._destination.path
        if shared is not None and not any(_GLOB & set(text) for text in (str(shared), *keys)):
            return [shared / key for key in keys]
        folder.mkdir(exist_ok=True)
        return asyncio.run(self._fetch(keys, folder))

    async def _fetch(self, keys: Sequence[str], folder: Path) -> list[Path]:
        store = await self._destination.opened()
        free = asyncio.Semaphore(_AT_ONCE)

        async def fetch(number: int, key: str) -> Path:
            async with free:
                # Not under their keys, which others have chosen.
                form = next(form for form in _FORMS if key.endswith(form))
                return await self._fetch_one(store, key, folder / f"{number}{form}")

        return await asyncio.gather(*(fetch(number, key) for number, key in enumerate(keys)))

    async def _fetch_one(self, store: "ObjectStore", key: str, path: Path) -> Path:
        import obstore

        with self._destination.translating(key):
            content = await (await obstore.get_async(store, key)).bytes_async()
        path.write_bytes(content)
        return path
