"""Gradient scalers: they call an optimizer step off when they find infinite gradients."""

import functools
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler

from torchperfd.hooks.context import HookContext
from torchperfd.hooks.frames import keep_out_of_graphs, step_code
from torchperfd.hooks.patches import Patches


def install(context: HookContext, patches: Patches) -> None:
    """Time ``GradScaler.step`` as an optimizer step, whether or not it lets the optimizer step.

    It is where the host waits for the gradients, to look for infinities. Fused optimizers look
    for themselves, on the device: whether they did step is not known here.
    """
    original = vars(GradScaler)["step"]
    loop = context.loop
    recorder = loop.recorder

    def step(self: GradScaler, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not context.here():
            return original(self, optimizer, *args, **kwargs)
        depth = recorder.depth
        calls = -1
        try:
            loop.optimizer_begin(id(optimizer))
            calls = loop.optimizer_calls
        except Exception as error:  # noqa: BLE001 - nothing of ours may reach training
            context.fault("scaler", error)
        try:
            result = original(self, optimizer, *args, **kwargs)
        except BaseException:
            try:
                loop.leave(depth)
            except Exception as error:  # noqa: BLE001
                context.fault("scaler", error)
            raise
        if calls >= 0:
            try:
                loop.leave(depth + 1)
                loop.optimizer_end(id(optimizer), called_off=loop.optimizer_calls == calls)
            except Exception as error:  # noqa: BLE001
                context.fault("scaler", error)
        return result

    step_code.add(step.__code__)
    patches.replace(GradScaler, "step", functools.update_wrapper(keep_out_of_graphs(step), original))
