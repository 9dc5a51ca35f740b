"""Optimizers as they are made: early enough to see the first forward of their models."""

import functools
from typing import Any

from torch.optim import Optimizer

from torchperfd.events import codes
from torchperfd.hooks.context import HookContext, own_attribute
from torchperfd.hooks.frames import keep_out_of_graphs


def install(context: HookContext) -> None:
    """Look for the model of every optimizer as it is made."""
    make = own_attribute(Optimizer, "__init__")

    @functools.wraps(make)
    def init(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        make(optimizer, *args, **kwargs)
        try:
            models = context.links.models
            if context.active and context.buffer.here():
                if models.is_on_its_own(optimizer):
                    context.buffer.mark(codes.OPTIMIZER_MADE, id(optimizer))
                models.look_for_model(optimizer)
        except BaseException as error:
            if not context.absorb(error, costs_step=False):
                raise

    context.patches.replace(Optimizer, "__init__", keep_out_of_graphs(init))
