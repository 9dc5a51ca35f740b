"""Forward passes of the models that were found."""

import torch
from torch import nn

from torchperfd.events import Forward, codes
from torchperfd.hooks.context import HookContext, own_attribute

METHOD = "_call_impl"
PLACE = "_compiled_call_impl"
"""What torch calls instead of a module's own call, where it has been compiled in place.

Ours calls what was there. Unlike hooks it is left out where a module is pickled or copied, costs a module
without hooks no detour, and is not traced into graphs.
"""


def install(context: HookContext) -> None:
    """Time the forward of every model that is found from now on."""
    # What reads the place, and what is called in the end.
    for name in (PLACE, "_wrapped_call_impl", METHOD):
        own_attribute(nn.Module, name)

    def time(model: nn.Module) -> None:
        forward = Forward(
            context.buffer,
            model,
            vars(model).get(PLACE),
            METHOD,
            torch.is_grad_enabled,
            codes.FORWARD,
            codes.EVALUATE,
            codes.FORWARD_END,
        )
        context.patches.replace_own(model, PLACE, forward)

    context.links.time_forward = context.guard(time, None)
