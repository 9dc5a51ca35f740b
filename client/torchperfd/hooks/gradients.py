"""Backward passes and the zeroing of gradients."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.autograd
import torch.nn
import torch.optim

from torchperfd.hooks.context import HookContext
from torchperfd.hooks.frames import keep_out_of_graphs
from torchperfd.hooks.patches import Patches


def install(context: HookContext, patches: Patches) -> None:
    """Time ``torch.autograd.backward`` (which ``Tensor.backward`` calls) and both ``zero_grad``."""
    loop = context.loop
    backward = timed(context, "backward", torch.autograd.backward, loop.backward_begin, loop.backward_end)
    patches.replace(torch.autograd, "backward", keep_out_of_graphs(backward))
    for owner in (torch.optim.Optimizer, torch.nn.Module):
        zero_grad = timed(context, "zero_grad", vars(owner)["zero_grad"], loop.zero_begin, loop.leave)
        # An optimizer's breaks a graph without us too, a module's does not.
        patches.replace(owner, "zero_grad", keep_out_of_graphs(zero_grad, inline=owner is torch.nn.Module))


def timed(
    context: HookContext,
    place: str,
    original: Callable[..., Any],
    begin: Callable[[], None],
    end: Callable[[int], None],
) -> Callable[..., Any]:
    """Return ``original`` between ``begin()`` and ``end(depth)``: how deep phases were nested before."""
    recorder = context.loop.recorder

    @functools.wraps(original)
    def timed(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not context.here():
            return original(*args, **kwargs)
        depth = recorder.depth
        try:
            begin()
        except Exception as error:  # noqa: BLE001 - nothing of ours may reach training
            context.fault(place, error)
        try:
            return original(*args, **kwargs)
        finally:
            try:
                end(depth)
            except Exception as error:  # noqa: BLE001
                context.fault(place, error)

    return timed
