"""Looks at the instances of a class of torch's that the script makes."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from torchperfd.hooks.context import HookContext, own_attribute
from torchperfd.hooks.frames import keep_out_of_graphs


def after_making(context: HookContext, made: type, note: Callable[[Any], None]) -> None:
    """Call ``note`` with each instance of a class that is made from now on; not within compiled code.

    Raises:
        HookUnavailableError: The class has no ``__init__`` of its own.
    """
    original = own_attribute(made, "__init__")
    note_safely = context.guard(note, None)

    @functools.wraps(original)
    def init(instance: Any, *args: Any, **kwargs: Any) -> None:
        original(instance, *args, **kwargs)
        if not torch.compiler.is_compiling():
            note_safely(instance)

    context.patches.replace(made, "__init__", keep_out_of_graphs(init, inline=True))
