"""Layers that torch splits by tensor parallelism: their mesh shows a rank's place, if it has no names."""

import functools
import sys
from typing import Any, Final

import torch.distributed

from torchperfd.coordinates import Coordinate
from torchperfd.hooks.context import HookContext, own_attribute

_MODULE: Final = "torch.distributed.tensor.parallel.style"
_STYLES: Final = ("ColwiseParallel", "RowwiseParallel")
_DIMENSION: Final = "tp"


def install(context: HookContext) -> None:
    """Look at every layer that is split, from now on or once the script has imported what splits them."""
    if not torch.distributed.is_available():
        return
    context.when_imported(_MODULE, lambda: _follow(context))


def _follow(context: HookContext) -> None:
    places = context.links.places

    def note(mesh: Any) -> None:
        # Of a mesh with names, the dimensions are known by them.
        if not mesh.mesh_dim_names and mesh.ndim == 1:
            places[_DIMENSION] = Coordinate(_DIMENSION, mesh.get_local_rank(), mesh.size())

    note_safely = context.guard(note, None)
    for style in _STYLES:
        # The method, since scripts have imported ``parallelize_module`` by name before.
        made = own_attribute(sys.modules[_MODULE], style)
        context.patches.replace(made, "_apply", _noting(own_attribute(made, "_apply"), note_safely))


def _noting(original: Any, note: Any) -> Any:
    @functools.wraps(original)
    def apply(style: Any, module: Any, device_mesh: Any) -> Any:
        note(device_mesh)
        return original(style, module, device_mesh)

    return apply
