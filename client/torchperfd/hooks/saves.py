"""Checkpoints: what is written with ``torch.save`` or torch's distributed checkpoints."""

import functools
import sys
from types import ModuleType

import torch
import torch.serialization

from torchperfd.hooks.context import HookContext
from torchperfd.hooks.patches import Patches
from torchperfd.tape import Timed
from torchperfd.tape import events as on_tape

_DISTRIBUTED = "torch.distributed.checkpoint"


class Saves:
    """Times the functions that write checkpoints."""

    def __init__(self, context: HookContext, patches: Patches) -> None:
        self._context = context
        self._patches = patches
        self._found_distributed = False

    def install(self) -> None:
        """Time ``torch.save``."""
        self._time(torch, torch.serialization)
        self.look()

    def look(self) -> None:
        """Time ``torch.distributed.checkpoint.save`` once the script has imported it.

        It is never imported for this: that takes longer than most checkpoints.
        """
        module = sys.modules.get(_DISTRIBUTED)
        if self._found_distributed or module is None or "save" not in vars(module):
            return
        self._found_distributed = True
        self._time(module, sys.modules[module.save.__module__])

    def _time(self, *owners: ModuleType) -> None:
        """Time ``save`` in every module that has it by name: where it is defined, pickle looks for it."""
        original = vars(owners[0])["save"]
        save = Timed(self._context.tape, original, on_tape.SAVE, on_tape.SAVE_END)
        functools.update_wrapper(save, original)
        for owner in owners:
            if vars(owner).get("save") is original:
                self._patches.replace(owner, "save", save)
