"""Iterators of DataLoaders as they are made: what lies between two loops belongs to no step."""

import functools
from typing import Any

from torch.utils.data import DataLoader

from torchperfd.hooks.context import HookContext, own_attribute
from torchperfd.hooks.frames import keep_out_of_graphs


def install(context: HookContext) -> None:
    """Take note of every iterator that a loader makes, so that a loop that is left early shows."""
    begin = own_attribute(DataLoader, "__iter__")
    iterators = context.links.iterators

    @functools.wraps(begin)
    def iterate(self: Any) -> Any:
        begun = begin(self)
        try:
            if context.active:
                iterators.begin(begun)
        except BaseException as error:
            if not context.absorb(error, costs_step=False):
                raise
        return begun

    context.patches.replace(DataLoader, "__iter__", keep_out_of_graphs(iterate))
