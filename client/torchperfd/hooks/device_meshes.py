"""Device meshes with named dimensions, from which a rank's place in its job is read."""

import sys
from typing import Any, Final

import torch.distributed

from torchperfd.coordinates import Coordinate
from torchperfd.hooks.context import HookContext, own_attribute
from torchperfd.hooks.new_instances import after_making

_MODULE: Final = "torch.distributed.device_mesh"


def install(context: HookContext) -> None:
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
        after_making(context, own_attribute(sys.modules[_MODULE], "DeviceMesh"), note)

    context.when_imported(_MODULE, follow)
