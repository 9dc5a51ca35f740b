"""Functional collectives, which tensor parallelism is built on: how long the training thread is held there.

Their waits are operators in C++, which never come to the methods of ``Work``.
"""

import functools
import sys
from typing import Final

import torch
import torch.distributed
from torch import Tensor

from torchperfd.events import Timed, codes
from torchperfd.hooks.context import HookContext, own_attribute
from torchperfd.hooks.frames import keep_out_of_graphs

_MODULE: Final = "torch.distributed._functional_collectives"


def install(context: HookContext) -> None:
    """Time ``wait_tensor``, now or once the script has imported its module, which takes long by itself."""
    if not torch.distributed.is_available():
        return
    context.when_imported(_MODULE, lambda: _time_waits(context))


def _time_waits(context: HookContext) -> None:
    module = sys.modules[_MODULE]
    original = own_attribute(module, "wait_tensor")
    timed = Timed(context.buffer, original, codes.COLLECTIVE, codes.COLLECTIVE_END)

    @functools.wraps(original)
    def wait_tensor(tensor: Tensor) -> Tensor:
        # Compiled code has the operator in its graph, as it has without us.
        waited: Tensor = original(tensor) if torch.compiler.is_compiling() else timed(tensor)
        return waited

    context.patches.replace(module, "wait_tensor", keep_out_of_graphs(wait_tensor, inline=True))
