"""Models that the script compiles in place, with ``model.compile()``."""

import functools
from typing import Any

from torch import nn

from torchperfd.hooks.context import HookContext, own_attribute
from torchperfd.hooks.frames import keep_out_of_graphs


def install(context: HookContext) -> None:
    """Time the forward of a known model again once it has been compiled in place."""
    compile_in_place = own_attribute(nn.Module, "compile")

    @functools.wraps(compile_in_place)
    def compile(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        compile_in_place(module, *args, **kwargs)
        try:
            time = context.links.time_forward
            if context.active and time is not None and context.links.models.is_known(module):
                time(module)
        except BaseException as error:
            if not context.absorb(error, costs_step=False):
                raise

    context.patches.replace(nn.Module, "compile", keep_out_of_graphs(compile))
