"""Device meshes with named dimensions, from which a rank's place in its job is read."""

import functools
import sys
from typing import Any, Final

import torch
import torch.distributed

from torchperfd.coordinates import Coordinate
from torchperfd.hooks.context import HookContext, own_attribute
from torchperfd.hooks.frames import keep_out_of_graphs

_MODULE: Final = "torch.distributed.device_mesh"


def install(context: HookContext) -> None:
    """Look at every ``DeviceMesh`` that is made, from now on or once the script has imported it."""
    if not torch.distributed.is_available():
        return
    context.when_imported(_MODULE, lambda: _follow(context))


def _follow(context: HookContext) -> None:
    mesh_class = own_attribute(sys.modules[_MODULE], "DeviceMesh")
    original = own_attribute(mesh_class, "__init__")
    places = context.links.mesh_places

    def note(mesh: Any) -> None:
        names, coordinate = mesh.mesh_dim_names, mesh.get_coordinate()
        if names and coordinate:
            for number, (name, rank) in enumerate(zip(names, coordinate, strict=True)):
                places[name] = Coordinate(name, rank, mesh.size(number))

    note_safely = context.guard(note, None)

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if not torch.compiler.is_compiling():
            note_safely(self)

    context.patches.replace(mesh_class, "__init__", keep_out_of_graphs(init, inline=True))
