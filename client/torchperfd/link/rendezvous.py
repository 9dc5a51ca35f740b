"""The rendezvous: ranks of a job on different nodes exchange the addresses of their daemons.

All nodes of a job share the store that their ranks initialised with. A daemon that looks for its peers there
asks for it in its welcome. One rank of each node then adds its daemon's address to a list in the store and
reads those of the others. This uses a connection of its own, so training never waits for it.
"""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

from torchperfd.hooks import process_groups
from torchperfd.safety.interrupts import Flag
from torchperfd.safety.logs import log

TIMEOUT: Final = timedelta(seconds=10)
"""The timeout of a connection to the job's store."""
_POLL_S: Final = 1.0
_MAX_POLLS: Final = 600
# Ranks of other nodes may come to it later; after this the list is taken for whole.
_PAUSES_S: Final = (1.0, 4.0, 15.0, 60.0, 240.0, 0.0)
_MAX_BYTES: Final = 2**20


class Rendezvous:
    """Exchanges the addresses of the daemons with the job's other nodes.

    Args:
        on_daemons: Takes the addresses of all daemons, this node's among them, whenever there are more.
        environ: Of the process, as launchers set it.
    """

    def __init__(
        self, on_daemons: Callable[[Sequence[str]], None], environ: Mapping[str, str] = os.environ
    ) -> None:
        self._on_daemons = on_daemons
        # A job that was started again has other nodes, perhaps, and the same store.
        self._key = f"torchperfd/daemons/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        nodes = environ.get("GROUP_WORLD_SIZE", "")
        self._nodes = int(nodes) if nodes.isdecimal() else 0
        self._over = Flag()
        self._known: tuple[str, ...] = ()
        self._thread: threading.Thread | None = None

    def discover_peers(self, address: str) -> None:
        """Start the exchange; if it has run before, as for a daemon that is back, report its result again.

        Args:
            address: Where other daemons reach this node's.
        """
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, args=(address,), name="torchperfd-rendezvous", daemon=True
            )
            self._thread.start()
        elif self._known:
            self._on_daemons(self._known)

    def stop(self, timeout: float) -> None:
        """End it within so many seconds."""
        self._over.set()
        self.join(timeout)

    def join(self, timeout: float) -> bool:
        """Wait for the exchange to end, for so many seconds; return whether it has ended."""
        if self._thread is None:
            return True
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self, address: str) -> None:
        try:
            store = process_groups.connect_to_store(TIMEOUT) if self._wait_for_store() else None
            if store is not None:
                self._exchange(store, address)
        except Exception as error:  # noqa: BLE001 - the store is the job's, and may go whenever it likes
            log.info("this job's other daemons cannot be asked for: %s", error)

    def _wait_for_store(self) -> bool:
        """Wait until the ranks have met; return whether they have."""
        for _ in range(_MAX_POLLS):
            if process_groups.are_groups_initialized():
                return True
            if self._over.wait(_POLL_S):
                return False
        return False

    def _exchange(self, store: Any, address: str) -> None:
        store.append(self._key, f"{address}\n")
        for pause in _PAUSES_S:
            listed = bytes(store.get(self._key))[:_MAX_BYTES].decode().split("\n")[:-1]
            known = tuple(dict.fromkeys(listed))
            if known != self._known:
                self._known = known
                self._on_daemons(known)
            if len(known) >= self._nodes > 0 or self._over.wait(pause):
                return
