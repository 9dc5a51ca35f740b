"""The store that the ranks of a job have met at."""

import sys
from datetime import timedelta
from typing import Any


def is_there() -> bool:
    """Return whether the script has initialised torch's process groups."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    # Another thread may be importing the module, which then has some of its names only.
    is_initialized = getattr(c10d, "is_initialized", None)
    return is_initialized is not None and bool(is_initialized())


def connect(timeout: timedelta) -> Any:
    """Return a connection of our own to the store; None where the ranks have met without a network."""
    c10d: Any = sys.modules["torch.distributed.distributed_c10d"]
    store = c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if not (hasattr(store, "port") and hasattr(store, "append")):
        return None
    own: Any = vars(sys.modules["torch.distributed"])["TCPStore"]
    return own(store.host, store.port, is_master=False, wait_for_workers=False, timeout=timeout)
