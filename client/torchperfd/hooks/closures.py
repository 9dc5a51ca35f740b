"""Closures: what an optimizer's own step calls, and what that draws or steps, is part of the step."""

from torch.optim import Optimizer

from torchperfd.hooks.context import HookContext
from torchperfd.hooks.frames import step_code


def install(_context: HookContext) -> None:
    """Find out which code is around every optimizer's ``step``: one code object for all of them."""
    step_code.add(Optimizer.profile_hook_step(lambda _: None).__code__)
