"""A rank's place in its job: from device meshes, pipeline stages and layers split by tensor parallelism.

Meshes without dimension names are covered by the stages and the split layers.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed

from torchperfd.hooks.context import HookContext, own_attribute
from torchperfd.hooks.patches import keep_out_of_graphs
from torchperfd.hooks.process_groups import UNNAMED
from torchperfd.model.process import Coordinate


def after_making(context: HookContext, made: type, note: Callable[[Any], None]) -> None:
    """Call ``note`` with each instance of a class that is made from now on; not within compiled code.

    Raises:
        HookUnavailableError: The class has no ``__init__`` of its own.
    """
    original = own_attribute(made, "__init__")
    note_safely = context.guard(note, None)

    @functools.wraps(original)
    def init(instance: Any, *args: Any, **kwargs: Any) -> None:
        original(instance, *args, **kwargs)
        if not torch.compiler.is_compiling():
            note_safely(instance)

    context.patches.replace(made, "__init__", keep_out_of_graphs(init, inline=True))


_MESH_MODULE: Final = "torch.distributed.device_mesh"


def install_device_meshes(context: HookContext) -> None:
    """Look at every ``DeviceMesh`` that is made, from now on or once the script has imported it."""
    if not torch.distributed.is_available():
        return
    places = context.links.places

    def note(mesh: Any) -> None:
        names, coordinate = mesh.mesh_dim_names, mesh.get_coordinate()
        if names and coordinate:
            for number, (name, rank) in enumerate(zip(names, coordinate, strict=True)):
                places[name] = Coordinate(name, rank, mesh.size(number))

    def follow() -> None:
        after_making(context, own_attribute(sys.modules[_MESH_MODULE], "DeviceMesh"), note)

    context.when_imported(_MESH_MODULE, follow)


_STAGE_MODULE: Final = "torch.distributed.pipelining.stage"
_PIPELINE_DIMENSION: Final = "pp"


def install_pipeline_stages(context: HookContext) -> None:
    """Look at every stage that is made, from now on or once the script has imported the pipelines."""
    if not torch.distributed.is_available():
        return
    places = context.links.places

    def note(stage: Any) -> None:
        place = Coordinate(_PIPELINE_DIMENSION, stage.group_rank, stage.group_size)
        named = {(each.rank, each.size) for each in places.values()}
        # A mesh of one dimension, over all ranks, has the unnamed group of them all.
        if getattr(stage.group, "group_desc", "") in UNNAMED and (place.rank, place.size) not in named:
            places[_PIPELINE_DIMENSION] = place

    def follow() -> None:
        # Of both kinds of stages: those made by hand, and those of a model that torch has split.
        after_making(context, own_attribute(sys.modules[_STAGE_MODULE], "_PipelineStageBase"), note)

    context.when_imported(_STAGE_MODULE, follow)


_STYLE_MODULE: Final = "torch.distributed.tensor.parallel.style"
_SPLIT_STYLES: Final = ("ColwiseParallel", "RowwiseParallel")
_TENSOR_DIMENSION: Final = "tp"


def install_tensor_parallel(context: HookContext) -> None:
    """Look at every layer that is split, from now on or once the script has imported what splits them."""
    if not torch.distributed.is_available():
        return
    context.when_imported(_STYLE_MODULE, lambda: _follow_styles(context))


def _follow_styles(context: HookContext) -> None:
    places = context.links.places

    def note(mesh: Any) -> None:
        # Of a mesh with names, the dimensions are known by them.
        if not mesh.mesh_dim_names and mesh.ndim == 1:
            places[_TENSOR_DIMENSION] = Coordinate(_TENSOR_DIMENSION, mesh.get_local_rank(), mesh.size())

    note_safely = context.guard(note, None)
    for style in _SPLIT_STYLES:
        # The method, since scripts have imported ``parallelize_module`` by name before.
        made = own_attribute(sys.modules[_STYLE_MODULE], style)
        context.patches.replace(made, "_apply", _noting_mesh(own_attribute(made, "_apply"), note_safely))


def _noting_mesh(original: Any, note: Any) -> Any:
    @functools.wraps(original)
    def apply(style: Any, module: Any, device_mesh: Any) -> Any:
        note(device_mesh)
        return original(style, module, device_mesh)

    return apply
