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
from torchperfd.tape import Timed
from torchperfd.tape import events as on_tape


def install(context: HookContext, patches: Patches) -> None:
    """Time ``torch.autograd.backward`` (which ``Tensor.backward`` calls) and both ``zero_grad``."""
    backward = vars(torch.autograd)["backward"]
    timed = Timed(context.tape, backward, on_tape.BACKWARD, on_tape.BACKWARD_END)
    patches.replace(torch.autograd, "backward", functools.update_wrapper(timed, backward))
    for owner in (torch.optim.Optimizer, torch.nn.Module):
        original = vars(owner)["zero_grad"]
        zero_grad = method(original, Timed(context.tape, original, on_tape.ZERO, on_tape.ZERO_END))
        # An optimizer's breaks a graph without us too, a module's does not.
        patches.replace(owner, "zero_grad", keep_out_of_graphs(zero_grad, inline=owner is torch.nn.Module))


def method(original: Callable[..., Any], timed: Callable[..., Any]) -> Callable[..., Any]:
    """Return what is ``timed`` where it runs, and ``original`` where dynamo traces it into a graph.

    A function, since dynamo knows no other kind of method.
    """

    @functools.wraps(original)
    def either(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(*args, **kwargs)
        return timed(*args, **kwargs)

    return either
