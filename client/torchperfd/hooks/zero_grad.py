"""The zeroing of gradients."""

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn
import torch.optim

from torchperfd.events import Timed, codes
from torchperfd.hooks.context import HookContext, own_attribute
from torchperfd.hooks.frames import keep_out_of_graphs


def install(context: HookContext) -> None:
    """Time both ``zero_grad``: an optimizer's, and a model's, which shows that there is one."""
    for owner in (torch.optim.Optimizer, torch.nn.Module):
        original = own_attribute(owner, "zero_grad")
        timed = Timed(context.buffer, original, codes.ZERO, codes.ZERO_END)
        # Dynamo breaks its graph at an optimizer's without us too, a module's it traces.
        traced = owner is torch.nn.Module
        zero_grad = _traceable(original, timed, context) if traced else _function(original, timed)
        context.patches.replace(owner, "zero_grad", keep_out_of_graphs(zero_grad, inline=traced))


# Functions both, since dynamo knows no other kind of method.


def _function(original: Callable[..., Any], timed: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        return timed(*args, **kwargs)

    # Passing on whatever comes takes half a microsecond; torch's own has these arguments.
    @functools.wraps(original)
    def torchs(self: Any, set_to_none: bool = True) -> Any:
        if "opacus" in sys.modules and _keeps_sums(self):
            return original(self, set_to_none)
        return timed(self, set_to_none)

    return torchs if _arguments(original) == _arguments(torchs, follow=False) else method


def _keeps_sums(optimizer: Any) -> bool:
    """Return whether Opacus goes on to sum gradients up, while it zeroes those of every micro-batch."""
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return any(getattr(parameter, "summed_grad", None) is not None for parameter in parameters)


def _traceable(
    original: Callable[..., Any], timed: Callable[..., Any], context: HookContext
) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(*args, **kwargs)
        models = context.links.models
        if not models.alive and args:
            models.see(args[0])
        return timed(*args, **kwargs)

    return method


def _arguments(function: Callable[..., Any], follow: bool = True) -> list[tuple[str, Any]]:
    parameters = inspect.signature(function, follow_wrapped=follow).parameters.values()
    return [(parameter.name, parameter.default) for parameter in parameters]
