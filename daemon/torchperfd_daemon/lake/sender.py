"""Sends the batches of a journal: ``python -P -m torchperfd_daemon.lake.sender URL CLUSTER FOLDER NODE``.

A process of its own, at idle priority: pyarrow and obstore take more memory than the daemon may. It prints
the number and the size of each batch that the store has, and ends with 1 at the first that it does not take.
"""

import asyncio
import hashlib
import io
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from torchperfd_daemon.captures import low_priority
from torchperfd_daemon.captures.destination import Destination
from torchperfd_daemon.errors import TorchperfdError
from torchperfd_daemon.lake.journal import Batch, Journal
from torchperfd_daemon.lake.tables import PARQUET, parquet


def content_of(batch: Batch) -> bytes:
    """Return the content of a batch's object.

    Raises:
        TorchperfdError: It is to be Parquet, and pyarrow is no longer installed.
    """
    if batch.form != PARQUET:
        return batch.content
    try:
        return parquet(batch.table, batch.content)
    except ImportError as error:
        raise TorchperfdError(
            "the journal's batches become Parquet, which needs pyarrow", "`pip install pyarrow`"
        ) from error


async def send(destination: Destination, cluster: str, journal: Journal) -> AsyncIterator[tuple[int, int]]:
    """Send all batches that wait, the oldest first; yield the number and the size of each once it is there.

    Raises:
        TorchperfdError: The store, or the journal, failed.
    """
    for batch in journal.batches():
        content = content_of(batch)
        digest = hashlib.sha256(content).hexdigest()
        await destination.put(batch.key(cluster), io.BytesIO(content), len(content), digest)
        yield batch.sequence, len(content)


async def _report(destination: Destination, cluster: str, journal: Journal) -> None:
    async for sequence, size in send(destination, cluster, journal):
        sys.stdout.write(f"{sequence} {size}\n")
        sys.stdout.flush()


def main() -> None:
    """Send the batches that the arguments name."""
    low_priority.lower_priority()
    url, cluster, folder, node = sys.argv[1:]
    journal = Journal(Path(folder), node)
    try:
        asyncio.run(_report(Destination(url, os.environ), cluster, journal))
    except TorchperfdError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(1)
    finally:
        journal.close()


if __name__ == "__main__":
    main()
