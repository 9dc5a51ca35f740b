"""Stages of torch's pipelines, which show a rank's place where no mesh or process group has a name for it."""

import sys
from typing import Any, Final

import torch.distributed

from torchperfd.coordinates import Coordinate
from torchperfd.hooks.context import HookContext, own_attribute
from torchperfd.hooks.new_instances import after_making
from torchperfd.hooks.process_groups import UNNAMED

_MODULE: Final = "torch.distributed.pipelining.stage"
_DIMENSION: Final = "pp"


def install(context: HookContext) -> None:
    """Look at every stage that is made, from now on or once the script has imported the pipelines."""
    if not torch.distributed.is_available():
        return
    places = context.links.places

    def note(stage: Any) -> None:
        place = Coordinate(_DIMENSION, stage.group_rank, stage.group_size)
        named = {(each.rank, each.size) for each in places.values()}
        # A mesh of one dimension, over all ranks, has the unnamed group of them all.
        if getattr(stage.group, "group_desc", "") in UNNAMED and (place.rank, place.size) not in named:
            places[_DIMENSION] = place

    def follow() -> None:
        # Of both kinds of stages: those made by hand, and those of a model that torch has split.
        after_making(context, own_attribute(sys.modules[_MODULE], "_PipelineStageBase"), note)

    context.when_imported(_MODULE, follow)
