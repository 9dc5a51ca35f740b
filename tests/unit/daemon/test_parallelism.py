"""Kinds of parallelism: found from the names that people and frameworks give to process groups."""

import pytest

from torchperfd.model.process import Coordinate
from torchperfd_daemon.store.model import PARALLELISM_KINDS, coordinates_text, parallelism_kind, rank_in


@pytest.mark.parametrize(
    ("dimension", "kind"),
    [
        *(("dp", "data"), ("dp_shard", "data"), ("fsdp", "data"), ("DATA_PARALLEL_GROUP", "data")),
        *(("tp", "tensor"), ("TENSOR_MODEL_PARALLEL_GROUP", "tensor"), ("tensor-parallel", "tensor")),
        *(("pp", "pipeline"), ("PIPELINE_MODEL_PARALLEL_GROUP", "pipeline"), ("stage", "pipeline")),
        *(("ep", "expert"), ("EXPERT_MODEL_PARALLEL_GROUP", "expert")),
        *(("cp", "context"), ("CONTEXT_PARALLEL_GROUP", "context")),
        *(
            ("dp_cp", ""),
            ("EMBEDDING_GROUP", ""),
            ("DATA_PARALLEL_GROUP_WITH_CP", ""),
            ("", ""),
            ("mine", ""),
        ),
    ],
)
def test_a_dimension_is_of_the_kind_that_its_name_says(dimension: str, kind: str) -> None:
    assert parallelism_kind(dimension) == kind


def test_a_rank_has_a_place_in_each_kind() -> None:
    places = (
        Coordinate("pp", 1, 2),
        Coordinate("dp", 0, 2),
        Coordinate("tp", 3, 4),
        Coordinate("mine", 1, 2),
    )
    assert [rank_in(kind, places) for kind in PARALLELISM_KINDS] == [0, 3, 1, None, None]
    assert coordinates_text(places) == "pp=1 dp=0 tp=3 mine=1"
    assert (rank_in("data", ()), coordinates_text(())) == (None, "")


def test_hybrid_sharding_is_one_data_dimension() -> None:
    places = (Coordinate("dp_replicate", 2, 3), Coordinate("dp_shard", 1, 4))
    assert rank_in("data", places) == 2 * 4 + 1
