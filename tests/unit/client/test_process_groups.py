"""Process groups: coordinates of a rank, and groups that are derived in Python."""

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
    read_coordinates = lambda: process_groups.read_coordinates(client.parts.instruments.hooks.links.places)
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


_SCRIPT = """
import json, sys
from datetime import timedelta
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

class Mixin:
    def reduce(self, *args):
        raise ZeroDivisionError

class Group(dist.ProcessGroup):
    called = 0

    def allreduce(self, tensors, options=None):
        Group.called += 1
        raise ZeroDivisionError

class Around(Mixin, Group):
    def broadcast(self, tensors, options=None):
        return super().broadcast(tensors, options)

class Direct(Mixin, dist.ProcessGroup):
    pass

def attach():
    import torchperfd
    return torchperfd.attach()

def outcome(action):
    try:
        action()
    except Exception as error:
        return type(error).__name__ + ": " + (str(error).splitlines() or [""])[0]
    return "none"

before = {{each: dict(vars(each)) for each in (Mixin, Group, Around, Direct)}}
client = attach() if "{when}" == "before" else None
groups = [Around(0, 1), Group(0, 1), Direct(0, 1)]
if "{when}" == "after":
    client = attach()
ones = torch.ones(2)
methods = vars(dist.ProcessGroup)
names = [name for name in methods if not name.startswith("__") and callable(methods[name])]
outcomes = {{}}
for number, group in enumerate(groups):
    dist.distributed_c10d._register_process_group(f"group {{number}}", group)
    operators = {{
        "all_reduce": (ones, "sum"),
        "all_gather_into_tensor": (ones, 1),
        "reduce_scatter_tensor": (ones, "sum", 1),
        "broadcast": (ones, 0),
        "all_to_all_single": (ones, [2], [2]),
    }}
    for name, arguments in operators.items():
        operator = getattr(torch.ops._c10d_functional, name)
        outcomes[f"{{number}} {{name}}"] = outcome(lambda: operator(*arguments, f"group {{number}}"))
    for name in names:
        outcomes[f"{{number}} .{{name}}"] = outcome(lambda: getattr(group, name)([ones]))
        outcomes[f"{{number}} .{{name}}(,)"] = outcome(lambda: getattr(group, name)(ones, ones))
if client is not None:
    client.detach()
after = {{each: dict(vars(each)) for each in before}}
for each in before.values(), after.values():
    for names in each:
        names.pop("called", None)
print(json.dumps([outcomes, before == after]))
"""


def outcomes(when: str) -> list[Any]:
    """Return what became of every call, and whether the classes are as before.

    Args:
        when: Whether we attach before the groups are made, after that, or never.
    """
    script = _SCRIPT.format(when=when)
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=180)
    assert run.returncode == 0, run.stderr
    found: list[Any] = json.loads(run.stdout)
    return found


@pytest.fixture(scope="module")
def without_us() -> list[Any]:
    found = outcomes("never")
    assert found[0]["2 .reduce"] == "ZeroDivisionError: "
    assert found[0]["1 all_reduce"] == "ZeroDivisionError: "
    assert "No backend" in found[0]["0 all_gather_into_tensor"]
    assert found[1]
    return found


@pytest.mark.parametrize("when", ["before", "after"])
def test_calls_of_derived_groups_end_as_without_us(when: str, without_us: list[Any]) -> None:
    assert outcomes(when) == without_us
