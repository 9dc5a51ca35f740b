"""Buffers that ``DistributedDataParallel`` sends to all ranks ahead of a forward."""

import functools
from typing import Any

import torch.distributed

from torchperfd.events import Timed, codes
from torchperfd.hooks.context import HookContext, own_attribute
from torchperfd.hooks.frames import keep_out_of_graphs


def install(context: HookContext) -> None:
    """Time the call; a torch without distributed has nothing to time."""
    if not torch.distributed.is_available():
        return
    original = own_attribute(torch.distributed, "_broadcast_coalesced")
    timed = Timed(context.buffer, original, codes.COLLECTIVE, codes.COLLECTIVE_END)

    @functools.wraps(original)
    def broadcast(*args: Any, **kwargs: Any) -> Any:
        return timed(*args, **kwargs)

    context.patches.replace(torch.distributed, "_broadcast_coalesced", keep_out_of_graphs(broadcast))
