"""Backward passes and the zeroing of gradients."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.autograd
import torch.nn
import torch.optim

from torchperfd.hooks.context import HookContext
from torchperfd.hooks.patches import Patches
from torchperfd.recorder import ZERO_GRAD


def install(context: HookContext, patches: Patches) -> None:
    """Time ``torch.autograd.backward`` (which ``Tensor.backward`` calls) and both ``zero_grad``."""
    loop = context.loop
    patches.replace(
        torch.autograd,
        "backward",
        _timed(context, "backward", torch.autograd.backward, loop.backward_begin, loop.exit),
    )
    for owner in (torch.optim.Optimizer, torch.nn.Module):
        patches.replace(
            owner,
            "zero_grad",
            _timed(context, "zero_grad", vars(owner)["zero_grad"], lambda: loop.enter(ZERO_GRAD), loop.exit),
        )


def _timed(
    context: HookContext,
    place: str,
    original: Callable[..., Any],
    begin: Callable[[], None],
    end: Callable[[], None],
) -> Callable[..., Any]:
    @functools.wraps(original)
    def timed(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not context.here():
            return original(*args, **kwargs)
        try:
            begin()
        except Exception as error:  # noqa: BLE001 - nothing of ours may reach training
            context.fault(place, error)
        try:
            return original(*args, **kwargs)
        finally:
            try:
                end()
            except Exception as error:  # noqa: BLE001
                context.fault(place, error)

    return timed
