"""The process groups that a rank takes part in, as far as their makers have named them."""

import sys
from collections.abc import Mapping
from typing import Any, Final

from torchperfd.coordinates import Coordinate
from torchperfd.hooks import job_store

_MESH: Final = "mesh_"
"""A ``DeviceMesh`` calls the group of its dimension ``tp`` ``mesh_tp``, from torch 2.5 on."""
UNNAMED: Final = frozenset(("", "undefined", "default_pg"))
"""Descriptions of groups to which their makers have given none."""
_MOST: Final = 16


def read_coordinates(places: Mapping[str, Coordinate]) -> tuple[Coordinate, ...]:
    """Return the rank's place in each named group of more than one rank, in the order of their making.

    Of two groups of one name, the newest counts. A dimension of a device mesh has no group of its name if it
    is the only one, since it uses the group of all ranks, and before torch 2.5. Empty before the script has
    made any, and where torch keeps no list of them. Places in meshes stay known when the groups have ended.

    Args:
        places: The rank's place in each dimension that its device meshes, pipelines or split layers show.
    """
    found = {place.dimension: place for place in list(places.values()) if place.size > 1}
    if not job_store.is_there():
        return tuple(found.values())
    c10d: Any = sys.modules["torch.distributed.distributed_c10d"]
    # Copied in one call each: the script may make another meanwhile.
    groups = list(getattr(getattr(c10d, "_world", None), "pg_map", ()))
    for group in groups:
        name = getattr(group, "group_desc", "")
        if name in UNNAMED:
            continue
        dimension = name.removeprefix(_MESH)
        try:
            place = Coordinate(dimension, c10d.get_rank(group), c10d.get_world_size(group))
        except (RuntimeError, ValueError):
            continue  # the script has destroyed it meanwhile
        if place.rank >= 0 and place.size > 1:
            found.pop(dimension, None)
            found[dimension] = place
    return tuple(found.values())[-_MOST:]
