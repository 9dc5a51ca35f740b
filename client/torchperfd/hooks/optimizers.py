"""Optimizers: their creation, their steps, the zeroing of gradients, closures and gradient scalers.

Steps are timed through torch's global optimizer hooks, which cover every optimizer. A ``GradScaler`` skips
the step if it finds infinite gradients.
"""

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn
import torch.optim
from torch.optim import Optimizer

from torchperfd.events import Steps, Timed, codes
from torchperfd.hooks.context import HookContext, own_attribute
from torchperfd.hooks.patches import inside_step, keep_out_of_graphs, step_code


def install_closures(_context: HookContext) -> None:
    """Find out which code is around every optimizer's ``step``: one code object for all of them."""
    step_code.add(Optimizer.profile_hook_step(lambda _: None).__code__)


def install_new_optimizers(context: HookContext) -> None:
    """Look for the model of every optimizer as it is made."""
    make = own_attribute(Optimizer, "__init__")

    @functools.wraps(make)
    def init(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        make(optimizer, *args, **kwargs)
        try:
            models = context.links.models
            if context.active and context.buffer.here():
                if models.is_on_its_own(optimizer):
                    context.buffer.mark(codes.OPTIMIZER_MADE, id(optimizer))
                models.look_for_model(optimizer)
        except BaseException as error:
            if not context.absorb(error, costs_step=False):
                raise

    context.patches.replace(Optimizer, "__init__", keep_out_of_graphs(init))


def install_optimizers(context: HookContext) -> None:
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
        register_optimizer_step_pre_hook(_step_hook(steps, False, begin_unusual)),
        register_optimizer_step_post_hook(_step_hook(steps, True, end_elsewhere)),
    ]


def _step_hook(steps: Steps, ends: bool, otherwise: Callable[[Optimizer], None]) -> Callable[..., None]:
    """Return a hook that calls ``steps``, or else ``otherwise``; nothing of it gets into graphs."""
    compiling = torch.compiler.is_dynamo_compiling
    notify = steps.end if ends else steps.begin

    def hook(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if not compiling() and not notify(optimizer):
            otherwise(optimizer)

    return keep_out_of_graphs(hook, inline=True)


def install_zero_grad(context: HookContext) -> None:
    """Time both ``zero_grad``: an optimizer's, and a model's, which shows that there is one."""
    for owner in (torch.optim.Optimizer, torch.nn.Module):
        original = own_attribute(owner, "zero_grad")
        timed = Timed(context.buffer, original, codes.ZERO, codes.ZERO_END)
        # Dynamo breaks its graph at an optimizer's without us too, a module's it traces.
        traced = owner is torch.nn.Module
        zero_grad = (
            _traceable_zero_grad(original, timed, context) if traced else _untraced_zero_grad(original, timed)
        )
        context.patches.replace(owner, "zero_grad", keep_out_of_graphs(zero_grad, inline=traced))


# Functions both, since dynamo knows no other kind of method.


def _untraced_zero_grad(original: Callable[..., Any], timed: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        return timed(*args, **kwargs)

    # Passing on whatever comes takes half a microsecond; torch's own has these arguments.
    @functools.wraps(original)
    def torchs(self: Any, set_to_none: bool = True) -> Any:
        if "opacus" in sys.modules and _keeps_sums(self):
            return original(self, set_to_none)
        return timed(self, set_to_none)

    return torchs if _signature_of(original) == _signature_of(torchs, follow=False) else method


def _keeps_sums(optimizer: Any) -> bool:
    """Return whether Opacus goes on to sum gradients up, while it zeroes those of every micro-batch."""
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return any(getattr(parameter, "summed_grad", None) is not None for parameter in parameters)


def _traceable_zero_grad(
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


def _signature_of(function: Callable[..., Any], follow: bool = True) -> list[tuple[str, Any]]:
    parameters = inspect.signature(function, follow_wrapped=follow).parameters.values()
    return [(parameter.name, parameter.default) for parameter in parameters]


def install_grad_scaler(context: HookContext) -> None:
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
