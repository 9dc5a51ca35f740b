"""Optimizer steps, through torch's own global hooks: they see every optimizer there is."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from torchperfd.hooks.context import HookContext
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
        if torch.compiler.is_compiling() or not context.here():
            return
        try:
            before_step(optimizer)
            if recorder.depth and recorder.inside(OPTIMIZER) and not _is_nested(sys._getframe(1)):
                # An earlier step() raised, so its post hook never ran.
                recorder.unwind()
            loop.optimizer_begin()
        except Exception as error:  # noqa: BLE001 - nothing of ours may reach training
            context.fault("optimizer", error)

    def after(_optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if torch.compiler.is_compiling() or not context.here():
            return
        try:
            loop.optimizer_end()
        except Exception as error:  # noqa: BLE001
            context.fault("optimizer", error)

    return [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]


def _is_nested(wrapper: FrameType) -> bool:
    """Return whether torch's wrapper of ``step``, our caller, is at work further up the stack too."""
    outer = wrapper.f_back
    while outer is not None and outer.f_code is not wrapper.f_code:
        outer = outer.f_back
    return outer is not None
