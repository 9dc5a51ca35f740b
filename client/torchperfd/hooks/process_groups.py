"""torch's process groups, read without importing torch: a rank's place, the store, the Flight Recorder.

The store is where ranks of a job on different nodes exchange the addresses of their daemons. The Flight
Recorder has how far this process's collectives are.
"""

import json
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

from torchperfd.model.process import Coordinate, GroupProgress
from torchperfd.safety.interrupts import Flag
from torchperfd.safety.logs import log


def are_groups_initialized() -> bool:
    """Return whether the script has initialised torch's process groups."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    # Another thread may be importing the module, which then has some of its names only.
    is_initialized = getattr(c10d, "is_initialized", None)
    return is_initialized is not None and bool(is_initialized())


def connect_to_store(timeout: timedelta) -> Any:
    """Return a connection of our own to the store; None where the ranks have met without a network."""
    c10d: Any = sys.modules["torch.distributed.distributed_c10d"]
    store = c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if not (hasattr(store, "port") and hasattr(store, "append")):
        return None
    own: Any = vars(sys.modules["torch.distributed"])["TCPStore"]
    return own(store.host, store.port, is_master=False, wait_for_workers=False, timeout=timeout)


_MESH_PREFIX: Final = "mesh_"
"""A ``DeviceMesh`` calls the group of its dimension ``tp`` ``mesh_tp``, from torch 2.5 on."""
UNNAMED: Final = frozenset(("", "undefined", "default_pg"))
"""Descriptions of groups to which their makers have given none."""
_MAX_COORDINATES: Final = 16


def read_coordinates(places: Mapping[str, Coordinate]) -> tuple[Coordinate, ...]:
    """Return the rank's place in each named group of more than one rank, in the order of their making.

    Of two groups of one name, the newest counts. A dimension of a device mesh has no group of its name if it
    is the only one, since it uses the group of all ranks, and before torch 2.5. Empty before the script has
    made any, and where torch keeps no list of them. Places in meshes stay known when the groups have ended.

    Args:
        places: The rank's place in each dimension that its device meshes, pipelines or split layers show.
    """
    found = {place.dimension: place for place in list(places.values()) if place.size > 1}
    if not are_groups_initialized():
        return tuple(found.values())
    c10d: Any = sys.modules["torch.distributed.distributed_c10d"]
    # Copied in one call each: the script may make another meanwhile.
    groups = list(getattr(getattr(c10d, "_world", None), "pg_map", ()))
    for group in groups:
        name = getattr(group, "group_desc", "")
        if name in UNNAMED:
            continue
        dimension = name.removeprefix(_MESH_PREFIX)
        try:
            place = Coordinate(dimension, c10d.get_rank(group), c10d.get_world_size(group))
        except (RuntimeError, ValueError):
            continue  # the script has destroyed it meanwhile
        if place.rank >= 0 and place.size > 1:
            found.pop(dimension, None)
            found[dimension] = place
    return tuple(found.values())[-_MAX_COORDINATES:]


_C10D: Final = "torch._C._distributed_c10d"
# torch 2.13 has the first, which knows of gloo, too; before it there was the second, in builds with NCCL.
_DUMP_FUNCTIONS: Final = ("_dump_fr_trace_json", "_dump_nccl_trace_json")


def dump_flight_recorder() -> bytes | None:
    """Return the record as JSON; None where torch keeps none.

    Takes milliseconds, and the interpreter with it.

    Raises:
        RuntimeError: torch could not write it.
    """
    c10d = sys.modules.get(_C10D)
    found: Callable[[bool, bool], Any] | None = next(
        (getattr(c10d, name) for name in _DUMP_FUNCTIONS if hasattr(c10d, name)), None
    )
    return found(True, True) if found is not None else None


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
            store = connect_to_store(TIMEOUT) if self._wait_for_store() else None
            if store is not None:
                self._exchange(store, address)
        except Exception as error:  # noqa: BLE001 - the store is the job's, and may go whenever it likes
            log.info("this job's other daemons cannot be asked for: %s", error)

    def _wait_for_store(self) -> bool:
        """Wait until the ranks have met; return whether they have."""
        for _ in range(_MAX_POLLS):
            if are_groups_initialized():
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


_MAX_SIZES: Final = 4


def read(record: bytes) -> list[GroupProgress]:
    """Return the progress of each group, in the order in which the groups were first used.

    Args:
        record: JSON, as torch writes it.

    Raises:
        ValueError: It is in no form that is known.
    """
    try:
        document = json.loads(record)
        status = document.get("pg_status", {})
        entries: dict[str, list[Mapping[str, Any]]] = {}
        for entry in document.get("entries", ()):
            if not entry["is_p2p"]:
                entries.setdefault(str(entry["pg_id"]), []).append(entry)
        return [_group(of, status.get(group, {})) for group, of in entries.items()]
    except (AttributeError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"no record of collectives: {error!r}") from error


def _group(entries: Iterable[Mapping[str, Any]], status: Mapping[str, Any]) -> GroupProgress:
    ordered = sorted(entries, key=lambda entry: int(entry["collective_seq_id"]))
    name, description = ordered[0]["process_group"]
    waiting = next(
        (entry for entry in ordered if not entry["retired"] and entry["state"] != "completed"), None
    )
    sizes = waiting["input_sizes"] if waiting is not None else []
    return GroupProgress(
        str(name),
        str(description),
        max(int(ordered[-1]["collective_seq_id"]), int(status.get("last_enqueued_collective", 0))),
        int(waiting["collective_seq_id"]) if waiting is not None else 0,
        str(waiting["profiling_name"]).rpartition(":")[2] if waiting is not None else "",
        ", ".join("x".join(map(str, each)) or "1" for each in sizes[:_MAX_SIZES])
        + (", …" if len(sizes) > _MAX_SIZES else ""),
    )
