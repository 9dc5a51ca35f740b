"""Models that ``torch.load`` returns, for example the best so far."""

import functools
from typing import Any

import torch
import torch.serialization
from torch import nn

from torchperfd.hooks.context import HookContext, own_attribute
from torchperfd.hooks.frames import keep_out_of_graphs


def install(context: HookContext) -> None:
    """Time the forward of a loaded model if one of its class is timed."""
    load = own_attribute(torch.serialization, "load")

    @functools.wraps(load)
    def loaded(*args: Any, **kwargs: Any) -> Any:
        thing = load(*args, **kwargs)
        try:
            models = context.links.models
            known = context.active and isinstance(thing, nn.Module)
            if known and any(type(model) is type(thing) for model in models.living()):
                models.add(thing)
        except BaseException as error:
            if not context.absorb(error, costs_step=False):
                raise
        return thing

    keep_out_of_graphs(loaded)
    for owner in (torch, torch.serialization):
        if vars(owner).get("load") is load:
            context.patches.replace(owner, "load", loaded)
