"""Optimizer steps, through torch's own global hooks: they see every optimizer there is."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from torchperfd.hooks.context import HookContext
from torchperfd.hooks.frames import inside_step, keep_out_of_graphs
from torchperfd.recorder import OPTIMIZER


def install(context: HookContext, before_step: Callable[[Optimizer], None]) -> list[Any]:
    """Time every ``Optimizer.step``.

    Args:
        context: Where to report.
        before_step: Called with the optimizer ahead of each of its steps.

    Returns:
        Handles with a ``remove()`` method.
    """
    loop = context.loop
    recorder = loop.recorder

    def before(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        try:
            if not context.here() and not context.adopts():
                return
            before_step(optimizer)
            if recorder.depth and recorder.inside(OPTIMIZER) and not inside_step(sys._getframe(1).f_back):
                # An earlier step() raised, so its post hook never ran.
                recorder.unwind()
            loop.optimizer_begin(id(optimizer))
        except Exception as error:  # noqa: BLE001 - nothing of ours may reach training
            context.fault("optimizer", error)

    def after(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        try:
            if context.here():
                loop.optimizer_end(id(optimizer))
            elif context.active and context.on_autograds_thread():
                loop.stepped_elsewhere(id(optimizer))
        except Exception as error:  # noqa: BLE001
            context.fault("optimizer", error)

    return [
        register_optimizer_step_pre_hook(keep_out_of_graphs(before, inline=True)),
        register_optimizer_step_post_hook(keep_out_of_graphs(after, inline=True)),
    ]
