"""Backward passes."""

import functools

import torch.autograd

from torchperfd.events import Timed, codes
from torchperfd.hooks.context import HookContext, own_attribute


def install(context: HookContext) -> None:
    """Time ``torch.autograd.backward``, which ``Tensor.backward`` calls."""
    original = own_attribute(torch.autograd, "backward")
    timed = Timed(context.buffer, original, codes.BACKWARD, codes.BACKWARD_END)
    functools.update_wrapper(timed, original)
    context.patches.replace(torch.autograd, "backward", timed)
    context.links.backward = timed
