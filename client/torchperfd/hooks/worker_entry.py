"""The start of a DataLoader worker: from there on it answers requests for its stack."""

import functools
import sys

from torch.utils.data import dataloader

from torchperfd.hooks.context import HookContext, HookUnavailableError, own_attribute
from torchperfd.worker_stacks import WorkerEntry


def install(context: HookContext) -> None:
    """Have workers that start from now on answer requests for their stacks."""
    if sys.platform != "linux":
        raise HookUnavailableError("the sockets of workers are in Linux's abstract namespace")
    module = own_attribute(dataloader, "_utils").worker
    original = own_attribute(module, "_worker_loop")
    entry = WorkerEntry(context.links.worker_stacks.name, module.__name__, original.__name__, original)
    context.patches.replace(module, "_worker_loop", functools.update_wrapper(entry, original))
