"""Checkpoints: what is written with ``torch.save`` or torch's distributed checkpoints."""

import functools
import sys
from types import ModuleType

import torch
import torch.serialization

from torchperfd.events import Timed, codes
from torchperfd.hooks.context import HookContext, own_attribute

_DISTRIBUTED = "torch.distributed.checkpoint"


def install(context: HookContext) -> None:
    """Time ``torch.save``, and ``torch.distributed.checkpoint.save`` once the script has imported it.

    It is never imported for this: that takes longer than most checkpoints.
    """
    found: list[ModuleType] = []

    def look_for_distributed() -> None:
        module = sys.modules.get(_DISTRIBUTED)
        if not found and module is not None and "save" in vars(module):
            found.append(module)
            _time(context, module, sys.modules[module.save.__module__])

    _time(context, torch, torch.serialization)
    look_for_distributed()
    context.links.after_loader.append(context.guard(look_for_distributed, None))


def _time(context: HookContext, *owners: ModuleType) -> None:
    """Time ``save`` in every module that has it by name: where it is defined, pickle looks for it."""
    original = own_attribute(owners[0], "save")
    save = Timed(context.buffer, original, codes.SAVE, codes.SAVE_END)
    functools.update_wrapper(save, original)
    for owner in owners:
        if vars(owner).get("save") is original:
            context.patches.replace(owner, "save", save)
