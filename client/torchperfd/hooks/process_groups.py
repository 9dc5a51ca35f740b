"""torch's process groups, read without importing it: their store, a rank's place, the Flight Recorder.

The Flight Recorder records the newest collectives of each group. With NCCL, and with gloo from torch 2.13 on,
it is kept in memory unless ``TORCH_FR_BUFFER_SIZE`` is 0.
"""

import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Final

from torchperfd.model.process import Coordinate


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
