"""Replicas of ``DataParallel``: they share their original's attributes, and are not timed by themselves."""

import functools
from typing import Any

from torch import nn

from torchperfd.events import Forward
from torchperfd.hooks.context import HookContext, own_attribute
from torchperfd.hooks.forward import PLACE
from torchperfd.hooks.frames import keep_out_of_graphs


def install(context: HookContext) -> None:
    """Take the timed call off every replica: it would call the original."""
    replicate = own_attribute(nn.Module, "_replicate_for_data_parallel")

    @functools.wraps(replicate)
    def replicated(module: nn.Module) -> Any:
        replica = replicate(module)
        try:
            if isinstance(vars(replica).get(PLACE), Forward):
                del vars(replica)[PLACE]
        except BaseException as error:
            if not context.absorb(error, costs_step=False):
                raise
        return replica

    context.patches.replace(nn.Module, "_replicate_for_data_parallel", keep_out_of_graphs(replicated))
