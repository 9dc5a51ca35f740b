"""Checkpoints: what is written with ``torch.save`` or torch's distributed checkpoints."""

import sys

import torch

from torchperfd.hooks.context import HookContext
from torchperfd.hooks.frames import keep_out_of_graphs
from torchperfd.hooks.gradients import timed
from torchperfd.hooks.patches import Patches

_DISTRIBUTED = "torch.distributed.checkpoint"


class Saves:
    """Times the functions that write checkpoints."""

    def __init__(self, context: HookContext, patches: Patches) -> None:
        self._context = context
        self._patches = patches
        self._found_distributed = False

    def install(self) -> None:
        """Time ``torch.save``."""
        self._time(torch, "save")
        self.look()

    def look(self) -> None:
        """Time ``torch.distributed.checkpoint.save`` once the script has imported it.

        It is never imported for this: that takes longer than most checkpoints.
        """
        module = sys.modules.get(_DISTRIBUTED)
        if self._found_distributed or module is None or "save" not in vars(module):
            return
        self._found_distributed = True
        self._time(module, "save")

    def _time(self, owner: object, name: str) -> None:
        loop = self._context.loop
        save = timed(self._context, "save", vars(owner)[name], loop.save_begin, loop.save_end)
        self._patches.replace(owner, name, keep_out_of_graphs(save))
