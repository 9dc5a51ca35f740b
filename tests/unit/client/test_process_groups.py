"""Coordinates of a rank: read from the process groups that the script has made."""

import json
import os
import subprocess
import sys
import types
from typing import Any

import pytest

from torchperfd.hooks.process_groups import read_coordinates

# Each in a process of its own, forked from one that has imported torch.
_PROGRAM = """
import dataclasses, json, os, sys, traceback
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
import torchperfd
from torchperfd.hooks import process_groups

def found_with(make):
    client = torchperfd.attach()
    read_coordinates = lambda: process_groups.read_coordinates(client.parts.instruments.hooks.places)
    found = [read_coordinates()]
    dist.init_process_group("fake", rank=6, world_size=8, store=FakeStore())
    found.append(read_coordinates())
    exec(make, {"torch": torch, "dist": dist})
    found.append(read_coordinates())
    client.parts.flusher.refresh()
    dist.destroy_process_group()
    found.append(read_coordinates())
    client.parts.flusher.refresh()
    found.append(client.parts.flusher.totals.coordinates)
    return [[dataclasses.astuple(place) for place in places] for places in found]

for make in json.load(sys.stdin):
    child = os.fork()
    if not child:
        try:
            answer = found_with(make)
        except BaseException:
            answer = traceback.format_exc()
        print(json.dumps(answer), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""
_MESH = """
from torch.distributed.device_mesh import init_device_mesh
init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
"""
_WORLD = """
from torch.distributed.device_mesh import init_device_mesh
init_device_mesh("cpu", (8,), mesh_dim_names=("tp",))
init_device_mesh("cpu", (8, 1), mesh_dim_names=("tp", "dp"))
"""
_GROUPS = """
for ranks in ([0, 1, 2, 3], [4, 5, 6, 7]):
    dist.new_group(ranks, group_desc="DATA_PARALLEL_GROUP")
for ranks in ([[each] for each in range(8)]):
    dist.new_group(ranks, group_desc="EXPERT_MODEL_PARALLEL_GROUP")
dist.new_group([5, 6])
"""
_STAGES = """
from torch.distributed.pipelining import PipelineStage
group = dist.new_group([4, 5, 6])
PipelineStage(torch.nn.Linear(2, 2), 2, 6, torch.device("cpu"), torch.ones(1, 2), group=group)
PipelineStage(torch.nn.Linear(2, 2), 5, 6, torch.device("cpu"), torch.ones(1, 2), group=group)
"""
_STAGES_OF_ALL = """
from torch.distributed.pipelining import PipelineStage
PipelineStage(torch.nn.Linear(2, 2), 6, 8, torch.device("cpu"), torch.ones(1, 2))
"""
_STAGES_OF_A_MESH = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("pipe",))
PipelineStage(torch.nn.Linear(2, 2), 6, 8, torch.device("cpu"), torch.ones(1, 2), group=mesh.get_group())
"""
_STAGES_OF_A_DIMENSION = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("stage", "dp"))
group = mesh["stage"].get_group()
PipelineStage(torch.nn.Linear(2, 2), 3, 4, torch.device("cpu"), torch.ones(1, 2), group=group)
"""
_LAYERS = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
parallelize_module(torch.nn.Linear(8, 8), init_device_mesh("cpu", (8,)), ColwiseParallel())
"""
_LAYERS_OF_A_DIMENSION = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("data", "model"))
parallelize_module(torch.nn.Linear(8, 8), mesh["model"], ColwiseParallel())
"""
_AGAIN = """
for size in (2, 4):
    for first in range(0, 8, size):
        dist.new_group([*range(first, first + size)], group_desc="mesh_tp")
"""


_CASES = [
    (_MESH, [("pp", 1, 2), ("dp", 1, 2), ("tp", 0, 2)]),
    (_WORLD, [("tp", 6, 8)]),
    (_GROUPS, [("DATA_PARALLEL_GROUP", 2, 4)]),
    (_AGAIN, [("tp", 2, 4)]),
    (_STAGES, [("pp", 2, 3)]),
    (_STAGES_OF_ALL, [("pp", 6, 8)]),
    (_STAGES_OF_A_MESH, [("pipe", 6, 8)]),
    (_STAGES_OF_A_DIMENSION, [("stage", 3, 4), ("dp", 0, 2)]),
    (_LAYERS, [("tp", 6, 8)]),
    (_LAYERS_OF_A_DIMENSION, [("data", 3, 4), ("model", 0, 2)]),
]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What is read in each case before the groups exist, with the default one, with all, and after their end.

    The last is what the totals have then. Text is the traceback of a case that has failed.
    """
    makes = [make for make, _ in _CASES]
    run = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        input=json.dumps(makes),
        env={**os.environ, "TORCHPERFD_SOCKET": str(tmp_path_factory.mktemp("no daemon") / "absent.sock")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    return dict(zip(makes, map(json.loads, run.stdout.splitlines()), strict=True))


@pytest.mark.parametrize(
    ("make", "places"),
    _CASES,
    ids=[
        *("mesh", "mesh of all ranks", "groups", "same name"),
        *("stages", "stages of all ranks", "stages of a mesh", "stages of a dimension"),
        *("layers", "layers of a dimension"),
    ],
)
def test_named_groups_are_coordinates(
    make: str, places: list[tuple[str, int, int]], answers: dict[str, Any]
) -> None:
    assert isinstance(answers[make], list), answers[make]
    found = [[tuple(place) for place in each] for each in answers[make]]
    *found, afterwards, reported = found
    assert found == [[], [], places]
    assert afterwards == ([] if make in (_GROUPS, _AGAIN) else places)
    assert reported == places


def test_a_process_without_groups_has_no_coordinates() -> None:
    assert read_coordinates({}) == ()


def test_coordinates_of_a_module_in_import_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread imports torch.distributed, so the module has no name yet."""
    name = "torch.distributed.distributed_c10d"
    monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    assert read_coordinates({}) == ()
