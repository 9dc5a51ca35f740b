"""Optimizer steps, through torch's own global hooks: they see every optimizer there is."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from torchperfd.events import Steps, codes
from torchperfd.hooks.context import HookContext
from torchperfd.hooks.frames import inside_step, keep_out_of_graphs


def install(context: HookContext) -> None:
    """Time every ``Optimizer.step``, and look for the model of a new optimizer ahead of its first."""
    # Here, so that a torch without them loses this hook only.
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    buffer, models, settings = context.buffer, context.links.models, context.links.settings
    read_settings = context.guard(settings.read_at_step, None)
    steps = Steps(buffer, models.stepped, codes.OPTIMIZER, codes.OPTIMIZER_END)

    def begin_unusual(optimizer: Optimizer) -> None:
        try:
            # Torch's wrapper around this very step is not a step around it.
            frame = sys._getframe(2).f_back
            if not buffer.here():
                if not context.adopts():
                    return
                buffer.steps_open = 0
            models.before_step(optimizer)
            read_settings()
            if buffer.steps_open and not inside_step(frame):
                # An earlier step() raised, so its post hook never ran.
                buffer.steps_open = 0
                buffer.mark(codes.STALE)
            buffer.steps_open += buffer.mark(codes.OPTIMIZER, id(optimizer))
        except BaseException as error:
            if not context.absorb(error):
                raise

    def end_elsewhere(optimizer: Optimizer) -> None:
        try:
            if context.active and context.on_autograds_thread():
                buffer.write(codes.ELSEWHERE, id(optimizer))
        except BaseException as error:
            if not context.absorb(error):
                raise

    for function in (begin_unusual, end_elsewhere):
        keep_out_of_graphs(function, inline=True)
    context.handles += [
        register_optimizer_step_pre_hook(_hook(steps, False, begin_unusual)),
        register_optimizer_step_post_hook(_hook(steps, True, end_elsewhere)),
    ]


def _hook(steps: Steps, ends: bool, otherwise: Callable[[Optimizer], None]) -> Callable[..., None]:
    """Return a hook that calls ``steps``, or else ``otherwise``; nothing of it gets into graphs."""
    compiling = torch.compiler.is_dynamo_compiling
    notify = steps.end if ends else steps.begin

    def hook(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if not compiling() and not notify(optimizer):
            otherwise(optimizer)

    return keep_out_of_graphs(hook, inline=True)
