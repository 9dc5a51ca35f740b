"""Gradient scalers: they call an optimizer step off when they find infinite gradients."""

import functools
from typing import Any

import torch

from torchperfd.events import codes
from torchperfd.hooks.context import HookContext, own_attribute
from torchperfd.hooks.frames import keep_out_of_graphs, step_code


def install(context: HookContext) -> None:
    """Time ``GradScaler.step`` as an optimizer step, whether or not it lets the optimizer step.

    It is where the host waits for the gradients, to look for infinities. Fused optimizers look
    for themselves, on the device: whether they did step is not known here.
    """
    from torch.amp.grad_scaler import GradScaler

    original = own_attribute(GradScaler, "step")
    buffer = context.buffer

    def step(self: GradScaler, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not buffer.mark(codes.SCALER, id(optimizer)):
            return original(self, optimizer, *args, **kwargs)
        try:
            result = original(self, optimizer, *args, **kwargs)
        except BaseException:
            buffer.mark(codes.SCALER_FAILED)
            raise
        buffer.mark(codes.SCALER_END)
        return result

    step_code.add(step.__code__)
    context.patches.replace(GradScaler, "step", functools.update_wrapper(keep_out_of_graphs(step), original))
