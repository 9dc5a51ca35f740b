"""The ranks in the store, as the processes that collectors look at."""

from collections.abc import Iterator

from torchperfd_daemon.collectors.ranks import RankProcess
from torchperfd_daemon.store import Store


class RankProcesses:
    """Tells collectors which processes are ranks; called on their threads."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __call__(self) -> Iterator[RankProcess]:
        """Yield the ranks that are here or left a moment ago."""
        for rank in self._store.ranks():
            identity = rank.identity
            yield RankProcess(
                identity.run,
                identity.rank,
                identity.pid if rank.is_process_known else 0,
                identity.pid_namespace,
                identity.process_start_ticks,
            )
