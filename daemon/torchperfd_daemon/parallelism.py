"""The kinds of parallelism that a job's ranks are split by, from the names of its process groups."""

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final

from torchperfd.coordinates import Coordinate

KINDS: Final = ("data", "tensor", "pipeline", "expert", "context")
"""In the order in which people name them."""

# Meshes are named by scripts: torch's tutorials, torchtitan, accelerate and Megatron's process groups. A name
# is compared as a whole, so that a flattened mesh such as dp_cp is none of them.
_NAMES: Final = {
    "data": "dp|data|ddp|fsdp|replicate|shard|dp_replicate|dp_shard|hsdp|batch|data_parallel",
    "tensor": "tp|tensor|mp|model|tensor_parallel|tensor_model_parallel",
    "pipeline": "pp|pipe|pipeline|stage|pipeline_parallel|pipeline_model_parallel",
    "expert": "ep|expert|expert_parallel|expert_model_parallel",
    "context": "cp|sp|context|context_parallel|sequence_parallel",
}
_KIND_OF: Final = {name: kind for kind, names in _NAMES.items() for name in names.split("|")}
_SUFFIX: Final = re.compile(r"[_-]group$")


@lru_cache(maxsize=256)
def kind_of(dimension: str) -> str:
    """Return the kind of a dimension's parallelism; empty if its name says none."""
    return _KIND_OF.get(_SUFFIX.sub("", dimension.lower()).replace("-", "_"), "")


def rank_in(kind: str, coordinates: Iterable[Coordinate]) -> int | None:
    """Return a rank's place in one kind of parallelism; None if the job is not split by it.

    Two dimensions of a kind, as those of hybrid sharding, count as one, of which the first is the slower.
    """
    place = None
    for each in coordinates:
        if kind_of(each.dimension) == kind:
            place = (place or 0) * each.size + each.rank
    return place


def words(coordinates: Sequence[Coordinate]) -> str:
    """Return a rank's coordinates as people write them: ``pp=1 dp=0``."""
    return " ".join(f"{each.dimension}={each.rank}" for each in coordinates)
